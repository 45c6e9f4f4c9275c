"""The storage of the server: responses, items, conversation objects and contexts in SQLite."""
