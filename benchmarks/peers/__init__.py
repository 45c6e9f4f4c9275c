"""Kedge beside other libraries: the same scripts, on the same strict server; see ``__main__``."""
