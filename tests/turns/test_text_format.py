"""The string forms of blocks, parts and Turns."""

from hypothesis import given

from kedge.turns import (
    Block,
    FilePart,
    FrozenMap,
    OpaquePart,
    RefusalPart,
    Source,
    TextPart,
    Turn,
    assistant,
    image,
    system,
    user,
)
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


def test_turn_string_is_a_table() -> None:
    """Each line shows the index, kind, content and response id of a block."""
    reported = assistant("Hi", source=Source("resp_1"))
    turn = Turn([system("Be brief."), user("Hello"), reported], id="turn_1")
    assert repr(turn) == "<Turn turn_1, 3 blocks>"
    assert repr(turn.take(1)) == "<Turn turn_1, 1 block>"
    assert str(Turn(id="turn_1")) == "<Turn turn_1, 0 blocks>"
    assert str(turn).splitlines() == [
        "<Turn turn_1, 3 blocks>",
        "   0 system      Be brief.",
        "   1 user        Hello",
        "   2 assistant   Hi" + " " * (DEFAULT_WIDTH - 2) + " resp_1",
    ]


def test_long_content_is_truncated() -> None:
    """Truncated content ends with an ellipsis, and content that fits is shown completely."""
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
    assert shorten("\x00" * 9, 6) == r"\x00\…"
    assert describe(user("x" * 1000)) == "x" * (DEFAULT_WIDTH - 1) + "…"
    assert len(repr(user(image(b"x" * 100_000)))) < 100


def test_part_repr_is_short() -> None:
    """The repr of a part does not show the bytes of an image."""
    text = repr(image(b"x" * 100_000))
    assert text.startswith("<image data:image/png;base64,")
    assert len(text) < 100
    assert repr(FilePart(url="u", filename="n")) == "<file n>"
    assert repr(TextPart("a\nb")) == r"<text a\nb>"
    assert repr(RefusalPart("no")) == "<refusal no>"
    assert repr(OpaquePart(FrozenMap(type="input_audio", data="x"))) == "<opaque input_audio>"
