"""Authenticated encryption with Fernet (AES-CBC and HMAC-SHA256) of the ``cryptography`` package.

Chat states and the ``encrypted_content`` of the server share this implementation. It imports
neither turns nor planning, so the server can use it without sharing code with the planner.
``cryptography`` is imported on first use, because it takes longer to import than ``kedge --help``
takes to run. It is an extra: only what encrypts needs it.
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from importlib.util import find_spec
from os import urandom

from kedge.errors import InvalidSetting, describe_extra

Key = str | bytes
"""A key: 32 bytes in URL-safe base64."""


class FernetCipher:
    """Encryption and decryption of bytes with one or more keys.

    The first key encrypts and all keys decrypt, so a key can be replaced without losing data.

    Args:
        keys: One key, or several with the current one first.

    Raises:
        InvalidSetting: If a key is not 32 bytes in URL-safe base64, or the package is not installed.
    """

    def __init__(self, keys: Key | Iterable[Key]) -> None:
        try:
            from cryptography.fernet import Fernet, MultiFernet
        except ImportError as error:
            raise InvalidSetting(describe_extra("encryption")) from error
        all_keys = (keys,) if isinstance(keys, str | bytes) else tuple(keys)
        try:
            self._fernet = MultiFernet([Fernet(key) for key in all_keys])
        except (ValueError, TypeError):
            message = (
                "a key is 32 bytes in URL-safe base64; create one with kedge.conversation.new_key()"
            )
            raise InvalidSetting(message) from None  # the cause may quote the key

    def encrypt(self, data: bytes) -> bytes:
        """Return the data encrypted with the first key, as URL-safe base64."""
        return self._fernet.encrypt(data)

    def decrypt(self, data: bytes) -> bytes | None:
        """Return the decrypted data, or None if no key fits or the data was modified."""
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(data)
        except InvalidToken:
            return None


def can_encrypt() -> bool:
    """Return whether the package is installed."""
    return find_spec("cryptography") is not None


def new_key() -> str:
    """Return a new random key for ``FernetCipher``. Store it separately from the data."""
    return urlsafe_b64encode(urandom(32)).decode()
