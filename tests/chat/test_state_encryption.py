"""Encryption of state bytes with a key."""

import pytest

from kedge.chat.state import ENCRYPTED_PREFIX, FernetCipher, is_encrypted, new_key
from kedge.errors import InvalidSetting

SECRET = b'{"version": 2, "blocks": ["my name is Ada Lovelace"]}'


def test_encrypted_state_is_decrypted_with_the_same_key() -> None:
    """Decryption returns the original bytes, and the encrypted ones contain no plain text."""
    sealer = FernetCipher(new_key())
    encrypted = sealer.encrypt(SECRET)
    assert sealer.decrypt(encrypted) == SECRET
    assert b"Ada Lovelace" not in encrypted
    assert encrypted.isascii()


def test_encrypted_state_is_recognized_by_its_prefix() -> None:
    """Encrypted bytes are recognized by their prefix, and plain ones are not."""
    assert is_encrypted(FernetCipher(new_key()).encrypt(SECRET))
    assert is_encrypted(ENCRYPTED_PREFIX)
    assert not is_encrypted(SECRET)
    assert not is_encrypted(b"")


def test_another_key_decrypts_nothing() -> None:
    """Decryption with another key returns ``None`` and raises nothing."""
    assert FernetCipher(new_key()).decrypt(FernetCipher(new_key()).encrypt(SECRET)) is None


def test_changed_bytes_are_not_decrypted() -> None:
    """Encrypted bytes that were changed or truncated are not decrypted."""
    sealer = FernetCipher(new_key())
    encrypted = sealer.encrypt(SECRET)
    for position in (len(ENCRYPTED_PREFIX) + 2, len(encrypted) // 2, len(encrypted) - 4):
        flipped = b"A" if encrypted[position : position + 1] != b"A" else b"B"
        assert sealer.decrypt(encrypted[:position] + flipped + encrypted[position + 1 :]) is None
    assert sealer.decrypt(encrypted[:-8]) is None
    assert sealer.decrypt(SECRET) is None


def test_key_rotation() -> None:
    """The first key encrypts, and every key decrypts."""
    old, new = new_key(), new_key()
    both = FernetCipher([new, old])
    assert both.decrypt(FernetCipher(old).encrypt(SECRET)) == SECRET
    assert FernetCipher(new).decrypt(both.encrypt(SECRET)) == SECRET
    assert FernetCipher(old).decrypt(both.encrypt(SECRET)) is None


def test_key_may_be_text_or_bytes() -> None:
    """A key is accepted as text or bytes."""
    key = new_key()
    assert FernetCipher(key.encode()).decrypt(FernetCipher(key).encrypt(SECRET)) == SECRET


@pytest.mark.parametrize("keys", ["hunter2", b"hunter2", ["hunter2"], [""]])
def test_invalid_key_is_rejected_without_quoting_it(keys: str | bytes | list[str]) -> None:
    """The error explains how to create a key, and neither it nor its cause contains the given one."""
    with pytest.raises(InvalidSetting, match="new_key") as exc_info:
        FernetCipher(keys)
    assert "hunter2" not in str(exc_info.value)
    assert exc_info.value.__cause__ is None
