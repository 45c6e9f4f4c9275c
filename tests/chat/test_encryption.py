"""Encryption at rest: only the holder of a key reads a state."""

import pytest

from kedge.chat.encryption import ENCRYPTED_PREFIX, StateCipher, is_encrypted, new_key
from kedge.errors import InvalidSetting

SECRET = b'{"version": 2, "blocks": ["my name is Ada Lovelace"]}'


def test_what_was_sealed_is_opened_with_the_same_key() -> None:
    """The bytes come back exactly, and the sealed ones hold nothing of them."""
    sealer = StateCipher(new_key())
    sealed = sealer.encrypt(SECRET)
    assert sealer.decrypt(sealed) == SECRET
    assert b"Ada Lovelace" not in sealed
    assert sealed.isascii()


def test_a_sealed_state_is_known_by_its_beginning() -> None:
    """A plain one is not taken for it."""
    assert is_encrypted(StateCipher(new_key()).encrypt(SECRET))
    assert is_encrypted(ENCRYPTED_PREFIX)
    assert not is_encrypted(SECRET)
    assert not is_encrypted(b"")


def test_another_key_opens_nothing() -> None:
    """Nothing is raised: the state is not ours to read."""
    assert StateCipher(new_key()).decrypt(StateCipher(new_key()).encrypt(SECRET)) is None


def test_changed_bytes_open_nothing() -> None:
    """The seal is checked over every byte."""
    sealer = StateCipher(new_key())
    sealed = sealer.encrypt(SECRET)
    for place in (len(ENCRYPTED_PREFIX) + 2, len(sealed) // 2, len(sealed) - 4):
        flipped = b"A" if sealed[place : place + 1] != b"A" else b"B"
        assert sealer.decrypt(sealed[:place] + flipped + sealed[place + 1 :]) is None
    assert sealer.decrypt(sealed[:-8]) is None
    assert sealer.decrypt(SECRET) is None


def test_a_key_can_be_changed_without_losing_a_conversation() -> None:
    """The first key encrypts, all of them decrypt."""
    old, new = new_key(), new_key()
    both = StateCipher([new, old])
    assert both.decrypt(StateCipher(old).encrypt(SECRET)) == SECRET
    assert StateCipher(new).decrypt(both.encrypt(SECRET)) == SECRET
    assert StateCipher(old).decrypt(both.encrypt(SECRET)) is None


def test_a_key_may_be_text_or_bytes() -> None:
    """As it comes from the environment or from a file."""
    key = new_key()
    assert StateCipher(key.encode()).decrypt(StateCipher(key).encrypt(SECRET)) == SECRET


@pytest.mark.parametrize("keys", ["hunter2", b"hunter2", ["hunter2"], [""]])
def test_what_is_no_key_is_refused_unquoted(keys: str | bytes | list[str]) -> None:
    """The error says how to make one, and neither it nor its cause repeats what was given."""
    with pytest.raises(InvalidSetting, match="new_key") as caught:
        StateCipher(keys)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
