"""Encryption at rest: state bytes that only the holder of a key can read.

The cipher is Fernet of the ``cryptography`` package (AES and HMAC, authenticated), an extra of Kedge. Its
tokens are text, as plain states are, and can be kept in the same places. Several keys may be given: the
first one encrypts, all of them decrypt, so a key can be changed without losing a conversation.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kedge.errors import InvalidSetting

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

Key = str | bytes

ENCRYPTED_PREFIX = b"gAAAAA"
"""How every sealed state begins: Fernet's version, and the high bytes of its time stamp."""

_MISSING_EXTRA = "encrypted state needs the extra crypto: pip install 'kedge[crypto]'"


class StateCipher:
    """Encrypts and decrypts state bytes."""

    def __init__(self, keys: Key | Iterable[Key]) -> None:
        given = (keys,) if isinstance(keys, str | bytes) else tuple(keys)
        self._fernet = _build_fernet(given)

    def encrypt(self, data: bytes) -> bytes:
        """Encrypt with the first key."""
        return self._fernet.encrypt(data)

    def decrypt(self, data: bytes) -> bytes | None:
        """Decrypt with whichever key fits; nothing if none does, or the bytes were changed."""
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(data)
        except InvalidToken:
            return None


def is_encrypted(data: bytes) -> bool:
    """Whether these bytes are an encrypted state."""
    return data.startswith(ENCRYPTED_PREFIX)


def new_key() -> str:
    """Make a key for encrypted states. Keep it apart from them."""
    try:
        from cryptography.fernet import Fernet
    except ImportError as error:
        raise InvalidSetting(_MISSING_EXTRA) from error
    return Fernet.generate_key().decode()


def _build_fernet(keys: tuple[Key, ...]) -> "MultiFernet":
    try:
        from cryptography.fernet import Fernet, MultiFernet
    except ImportError as error:
        raise InvalidSetting(_MISSING_EXTRA) from error
    try:
        return MultiFernet([Fernet(key) for key in keys])
    except (ValueError, TypeError):
        words = "a key is 32 bytes in URL-safe base64; make one with kedge.chat.new_key()"
        raise InvalidSetting(words) from None  # the cause may quote the key
