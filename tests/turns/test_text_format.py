"""The string forms of blocks, parts and Turns."""

from hypothesis import given

from kedge.turns import Block, Turn, image, user
from kedge.turns.text_format import DEFAULT_WIDTH, describe, shorten
from strategies import blocks, turns


@given(blocks())
def test_block_repr_is_one_printable_line(block: Block) -> None:
    """The repr of any block escapes control characters and truncates long content."""
    text = repr(block)
    assert text.isprintable()
    assert len(text) <= DEFAULT_WIDTH + len("<tool_result >")


@given(turns())
def test_turn_string_has_one_line_per_block(turn: Turn) -> None:
    """The string form of a Turn has a line for the Turn and one for each block."""
    assert len(str(turn).split("\n")) == 1 + len(turn)
    assert repr(turn).isprintable()


def test_long_content_is_truncated() -> None:
    """Truncated content ends with an ellipsis, and content that fits is shown completely."""
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
    assert shorten("\x00" * 9, 6) == r"\x00\…"
    assert describe(user("x" * 1000)) == "x" * (DEFAULT_WIDTH - 1) + "…"
    assert len(repr(user(image(b"x" * 100_000)))) < 100
