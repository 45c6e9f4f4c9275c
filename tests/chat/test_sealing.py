"""Encryption at rest: only the holder of a key reads a state."""

import pytest

from kedge.chat.sealing import MARK, Sealer, is_sealed, new_key
from kedge.errors import InvalidSetting

SECRET = b'{"version": 2, "blocks": ["my name is Ada Lovelace"]}'


def test_what_was_sealed_is_opened_with_the_same_key() -> None:
    """The bytes come back exactly, and the sealed ones hold nothing of them."""
    sealer = Sealer(new_key())
    sealed = sealer.seal(SECRET)
    assert sealer.open(sealed) == SECRET
    assert b"Ada Lovelace" not in sealed
    assert sealed.isascii()


def test_a_sealed_state_is_known_by_its_beginning() -> None:
    """A plain one is not taken for it."""
    assert is_sealed(Sealer(new_key()).seal(SECRET))
    assert is_sealed(MARK)
    assert not is_sealed(SECRET)
    assert not is_sealed(b"")


def test_another_key_opens_nothing() -> None:
    """Nothing is raised: the state is not ours to read."""
    assert Sealer(new_key()).open(Sealer(new_key()).seal(SECRET)) is None


def test_changed_bytes_open_nothing() -> None:
    """The seal is checked over every byte."""
    sealer = Sealer(new_key())
    sealed = sealer.seal(SECRET)
    for place in (len(MARK) + 2, len(sealed) // 2, len(sealed) - 4):
        flipped = b"A" if sealed[place : place + 1] != b"A" else b"B"
        assert sealer.open(sealed[:place] + flipped + sealed[place + 1 :]) is None
    assert sealer.open(sealed[:-8]) is None
    assert sealer.open(SECRET) is None


def test_a_key_can_be_changed_without_losing_a_conversation() -> None:
    """The first key encrypts, all of them decrypt."""
    old, new = new_key(), new_key()
    both = Sealer([new, old])
    assert both.open(Sealer(old).seal(SECRET)) == SECRET
    assert Sealer(new).open(both.seal(SECRET)) == SECRET
    assert Sealer(old).open(both.seal(SECRET)) is None


def test_a_key_may_be_text_or_bytes() -> None:
    """As it comes from the environment or from a file."""
    key = new_key()
    assert Sealer(key.encode()).open(Sealer(key).seal(SECRET)) == SECRET


@pytest.mark.parametrize("keys", ["hunter2", b"hunter2", ["hunter2"], [""]])
def test_what_is_no_key_is_refused_unquoted(keys: str | bytes | list[str]) -> None:
    """The error says how to make one, and neither it nor its cause repeats what was given."""
    with pytest.raises(InvalidSetting, match="new_key") as caught:
        Sealer(keys)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
