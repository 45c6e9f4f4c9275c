"""Old tool exchanges become short: the pair stays a pair, and facts can still be found."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.histories import done
from kedge.compaction import CompactionRequest, ToolExchangeCompactor, attempt
from kedge.compaction.shortening import short_json, short_text
from kedge.turns import (
    Block,
    FilePart,
    ToolCallBlock,
    ToolResultBlock,
    assistant,
    image,
    opaque,
    tool_call,
    tool_result,
    user,
)


def exchange(number: int, output: Any, arguments: Any = None) -> tuple[Block, ...]:
    """One question that a tool answered."""
    call_id = f"call_{number}"
    return (
        user(f"question {number}"),
        tool_call("look", arguments or {"n": number}, call_id=call_id),
        tool_result(call_id, output),
        assistant(f"answer {number}"),
    )


def shortened(blocks: tuple[Block, ...], **settings: Any) -> tuple[Block, ...]:
    """What the compactor makes of blocks, at once."""
    compactor = ToolExchangeCompactor(
        **{"max_characters": 100, "keep_exchanges": 1, "min_saving": 1, **settings}
    )
    return done(attempt(compactor, CompactionRequest(blocks))).blocks


def output(blocks: tuple[Block, ...], index: int = 2) -> str:
    """The output of the tool at this place."""
    block = blocks[index]
    assert isinstance(block, ToolResultBlock)
    return block.text


def test_long_outputs_keep_their_beginning_and_end() -> None:
    """What was left out is said in place, and how much that was in the metadata."""
    text = "first line\n" + "middle\n" * 200 + "last line"
    blocks = (*exchange(0, text), *exchange(1, "x"))
    made = shortened(blocks)
    assert output(made).startswith("first line")
    assert output(made).endswith("last line")
    assert "characters left out" in output(made)
    assert len(output(made)) < 160
    assert made[2].metadata["shortened"] == len(text)
    assert made[2].id == blocks[2].id
    assert [b.kind for b in made] == [b.kind for b in blocks]


def test_json_keeps_its_members_and_its_facts() -> None:
    """Numbers and short texts stay; long texts and lists are cut; it is still JSON."""
    found = {"total": 4711, "name": "Ada", "rows": list(range(500)), "page": "lorem " * 300}
    made = shortened((*exchange(0, found), *exchange(1, "x")))
    members = json.loads(output(made))
    assert members["total"] == 4711
    assert members["name"] == "Ada"
    assert members["rows"][0] == 0
    assert members["rows"][-1].endswith(" more)")
    assert members["page"].startswith("lorem")


def test_arguments_stay_json() -> None:
    """Also those that are no JSON to begin with; a free-form tool keeps free text."""
    long = (*exchange(0, "x", {"text": "lorem " * 300, "n": 7}), *exchange(1, "x"))
    call = shortened(long)[1]
    assert isinstance(call, ToolCallBlock)
    assert json.loads(call.arguments)["n"] == 7
    broken = (*exchange(0, "x", "not json " * 100), *exchange(1, "x"))
    call = shortened(broken)[1]
    assert isinstance(call, ToolCallBlock)
    assert list(json.loads(call.arguments)) == ["shortened"]
    free = (
        user("a"),
        tool_call("note", "words " * 100, call_id="c", custom=True),
        tool_result("c", "x", custom=True),
        *exchange(1, "x"),
    )
    call = shortened(free)[1]
    assert isinstance(call, ToolCallBlock)
    assert call.arguments.startswith("words")


def test_pictures_and_files_are_told() -> None:
    """A model need not see them again to know that they were there."""
    shown = [image(b"\x89PNG" * 100), FilePart(file_id="file_1", filename="plan.pdf")]
    made = shortened((*exchange(0, shown), *exchange(1, "x")))
    assert output(made) == "[an image was left out]\n[a file was left out: plan.pdf]"


def test_the_newest_exchanges_stay_as_they_are() -> None:
    """As many as one wants to keep; calls of hosted tools and other blocks are not touched."""
    hosted = opaque({"type": "web_search_call", "action": {"query": "x" * 500}})
    blocks = (hosted, *(b for n in range(4) for b in exchange(n, "long " * 100)))
    made = shortened(blocks, keep_exchanges=2)
    assert [block is old for block, old in zip(made, blocks, strict=True)].count(False) == 2
    assert made[9:] == blocks[9:]
    assert shortened(blocks, keep_exchanges=9) == blocks


def test_it_waits_until_it_is_worth_it() -> None:
    """Below ``min_saving`` nothing changes, so the chain is not broken at every turn."""
    blocks = (*exchange(0, "long " * 100), *exchange(1, "x"))
    assert shortened(blocks, min_saving=1_000) == blocks
    assert shortened(blocks, min_saving=300) != blocks


def test_what_is_short_is_not_shortened_again() -> None:
    """Once is enough."""
    first = shortened((*exchange(0, "long " * 100), *exchange(1, "x")))
    assert shortened(first, max_characters=10) == first


@given(
    st.text(max_size=400)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=60),
        lambda inner: (
            st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=6), inner, max_size=6)
        ),
    ).map(json.dumps),
    st.integers(1, 200),
)
def test_shortening_takes_any_text(text: str, most: int) -> None:
    """What is short enough stays; JSON arguments are JSON in any case; nothing unsendable comes out."""
    made = short_text(text, most)
    assert made == text if len(text) <= most else len(made) <= max(most + 50, 2 * most)
    made.encode()
    json.loads(short_json(text, most))


@pytest.mark.parametrize("text", ['{"a": NaN}' * 50, "[" * 5_000, '{"n": ' + "9" * 9_000 + "}"])
def test_what_only_looks_like_json_is_cut_as_text(text: str) -> None:
    """A number out of range, a well without a bottom: no exception, no invented value."""
    assert "left out" in short_text(text, 50)


def test_half_a_character_survives_as_an_escape() -> None:
    """A lone surrogate can be written in JSON text, and only as an escape."""
    text = json.dumps({"a": "\ud800", "b": "x" * 500})
    assert "\\ud800" in short_text(text, 400)
