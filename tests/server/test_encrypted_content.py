"""Encrypted content can be decrypted only by the server that encrypted it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kedge.server.encrypted_content import ContentCipher

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=10,
)

CIPHER = ContentCipher(b"k" * 32)


@given(values)
def test_encrypted_content_is_decrypted_with_the_same_key(value: Any) -> None:
    """The same key decrypts the value, another key does not, and equal values are encrypted differently."""
    encrypted = CIPHER.encrypt(value)
    assert ContentCipher(b"k" * 32).decrypt(encrypted) == value
    assert ContentCipher(b"x" * 32).decrypt(encrypted) is None
    assert CIPHER.encrypt(value) != encrypted


@given(st.data())
def test_any_change_is_detected(data: st.DataObject) -> None:
    """Content with a character inserted, removed or replaced is not decrypted."""
    encrypted = CIPHER.encrypt({"text": "hello"})
    assert "hello" not in encrypted
    index = data.draw(st.integers(0, len(encrypted) - 1))
    other = data.draw(st.sampled_from("Aa0_-=!é\n "))
    for changed in (
        encrypted[:index] + other + encrypted[index:],
        encrypted[:index] + encrypted[index + 1 :],
        encrypted[:index] + other + encrypted[index + 1 :],
    ):
        assert changed == encrypted or CIPHER.decrypt(changed) is None
