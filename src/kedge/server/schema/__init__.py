"""Schemas of requests as data.

``validators`` defines validators, and ``tables`` builds tables of them from the types of the openai and anthropic
packages: the ``items`` of a conversation with content and tools, and the ``requests`` of each endpoint. In a
table of members ``!`` after a name means that the member is required, ``?`` that it may be null, and a table in place
of a validator is an object with these members.
"""
