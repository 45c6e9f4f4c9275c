"""Access tokens, encryption keys, and URLs that cannot lead to another server."""
