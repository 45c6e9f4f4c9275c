"""Sealed content opens for its own server, unchanged, and for nobody else."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kedge.server.encrypted_content import ContentCipher

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=10,
)


@given(values)
def test_what_was_sealed_can_be_opened(value: Any) -> None:
    """By the same key, and by no other."""
    sealed = ContentCipher(b"k" * 32).encrypt(value)
    assert ContentCipher(b"k" * 32).decrypt(sealed) == value
    assert ContentCipher(b"x" * 32).decrypt(sealed) is None


@given(st.data())
def test_any_change_is_noticed(data: st.DataObject) -> None:
    """One character more, less or other, anywhere."""
    sealer = ContentCipher(b"k" * 32)
    sealed = sealer.encrypt({"text": "hello"})
    place = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.sampled_from("Aa0_-=!é\n "))
    for changed in (
        sealed[:place] + other + sealed[place:],
        sealed[:place] + sealed[place + 1 :],
        sealed[:place] + other + sealed[place + 1 :],
    ):
        assert changed == sealed or sealer.decrypt(changed) is None


@given(st.text())
def test_nonsense_is_no_seal(text: str) -> None:
    """Whatever it is."""
    assert ContentCipher(b"k" * 32).decrypt(text) is None


def test_two_seals_of_one_value_differ_and_hide_it() -> None:
    """Nobody can tell from outside what is inside, or whether it is the same."""
    sealer = ContentCipher(b"k" * 32)
    one, other = sealer.encrypt("attack at dawn"), sealer.encrypt("attack at dawn")
    assert one != other
    assert "attack" not in one
