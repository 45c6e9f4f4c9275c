"""Access tokens, encryption keys, URLs that cannot lead to another server, and dictionaries of limited length."""
