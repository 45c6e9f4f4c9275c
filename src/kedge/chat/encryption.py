"""Encryption of chat states at rest.

An encrypted state is a Fernet token. Like a plain state it is text, so it can be stored in the same way.
"""

from kedge.encryption import FernetCipher as StateCipher
from kedge.encryption import Key, new_key

__all__ = ["ENCRYPTED_PREFIX", "Key", "StateCipher", "is_encrypted", "new_key"]

ENCRYPTED_PREFIX = b"gAAAAA"
"""The first bytes of every encrypted state: Fernet's version and the high bytes of its time."""


def is_encrypted(data: bytes) -> bool:
    """Return whether these bytes are an encrypted state."""
    return data.startswith(ENCRYPTED_PREFIX)
