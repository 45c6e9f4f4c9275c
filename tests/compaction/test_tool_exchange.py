"""Shortening old tool exchanges: calls and results stay paired, and short values remain."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.histories import run_immediately
from kedge import turns
from kedge.compaction import CompactionRequest, ToolExchangeCompactor, run_compactor
from kedge.compaction.tool_exchange import truncate_json, truncate_text


def make_exchange(number: int, output: Any, arguments: Any = None) -> tuple[turns.Block, ...]:
    """Return a question, a tool call, its result and an answer."""
    call_id = f"call_{number}"
    return (
        turns.user(f"question {number}"),
        turns.tool_call("look", arguments or {"n": number}, call_id=call_id),
        turns.tool_result(call_id, output),
        turns.assistant(f"answer {number}"),
    )


def shorten(blocks: tuple[turns.Block, ...], **settings: Any) -> tuple[turns.Block, ...]:
    """Return the blocks after compaction with these settings."""
    compactor = ToolExchangeCompactor(
        **{"max_characters": 100, "keep_exchanges": 1, "min_saving": 1, **settings}
    )
    return run_immediately(run_compactor(compactor, CompactionRequest(blocks))).blocks


def output_text(blocks: tuple[turns.Block, ...], index: int = 2) -> str:
    """Return the text of the tool result at this index."""
    block = blocks[index]
    assert isinstance(block, turns.ToolResultBlock)
    return block.text


def test_long_output_retains_its_start_and_end() -> None:
    """A shortened output states how much was left out, and its metadata has the original length."""
    text = "first line\n" + "middle\n" * 200 + "last line"
    blocks = (*make_exchange(0, text), *make_exchange(1, "x"))
    result = shorten(blocks)
    assert output_text(result).startswith("first line")
    assert output_text(result).endswith("last line")
    assert "characters left out" in output_text(result)
    assert len(output_text(result)) < 160
    assert result[2].metadata["kedge.shortened"] == len(text)
    assert result[2].id == blocks[2].id
    assert [b.kind for b in result] == [b.kind for b in blocks]


def test_shortened_json_retains_its_members() -> None:
    """Shortened outputs and arguments are JSON with numbers and short texts, except those of custom tools."""
    value = {"total": 4711, "name": "Ada", "rows": list(range(500)), "page": "lorem " * 300}
    shortened = shorten((*make_exchange(0, value, value), *make_exchange(1, "x")))
    call = shortened[1]
    assert isinstance(call, turns.ToolCallBlock)
    for text in (output_text(shortened), call.arguments):
        members = json.loads(text)
        assert (members["total"], members["name"], members["rows"][0]) == (4711, "Ada", 0)
        assert members["rows"][-1].endswith(" more)")
        assert members["page"].startswith("lorem")
    free = turns.tool_call("note", "words " * 100, call_id="c", custom=True)
    result = turns.tool_result("c", "x", custom=True)
    call = shorten((turns.user("a"), free, result, *make_exchange(1, "x")))[1]
    assert isinstance(call, turns.ToolCallBlock)
    assert call.arguments.startswith("words")


def test_images_and_files_are_described() -> None:
    """Images and files are replaced by a short description."""
    content = [turns.image(b"\x89PNG" * 100), turns.FilePart(file_id="file_1", filename="plan.pdf")]
    shortened = shorten((*make_exchange(0, content), *make_exchange(1, "x")))
    assert output_text(shortened) == "[an image was left out]\n[a file was left out: plan.pdf]"


def test_newest_exchanges_are_unchanged() -> None:
    """The newest ``keep_exchanges`` exchanges and blocks of hosted tools are unchanged."""
    hosted = turns.opaque({"type": "web_search_call", "action": {"query": "x" * 500}})
    blocks = (hosted, *(b for n in range(4) for b in make_exchange(n, "long " * 100)))
    shortened = shorten(blocks, keep_exchanges=2)
    assert [block is old for block, old in zip(shortened, blocks, strict=True)].count(False) == 2
    assert shortened[9:] == blocks[9:]
    assert shorten(blocks, keep_exchanges=9) == blocks


def test_an_output_that_would_grow_is_unchanged() -> None:
    """A note about the removed text may be longer than that text."""
    outputs = ("x" * 110, "long " * 100, "x")
    blocks = tuple(b for number, text in enumerate(outputs) for b in make_exchange(number, text))
    shortened = shorten(blocks)
    assert [new is old for new, old in zip(shortened, blocks, strict=True)].count(False) == 1


def test_min_saving() -> None:
    """Nothing changes if less than ``min_saving`` is saved, so that the chain is not broken every time."""
    blocks = (*make_exchange(0, "long " * 100), *make_exchange(1, "x"))
    assert shorten(blocks, min_saving=1_000) == blocks
    assert shorten(blocks, min_saving=300) != blocks


def test_shortened_output_is_not_shortened_again() -> None:
    """A shortened output is not shortened again, even with a lower limit."""
    first = shorten((*make_exchange(0, "long " * 100), *make_exchange(1, "x")))
    assert shorten(first, max_characters=10) == first


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
def test_any_text_can_be_shortened(text: str, maximum: int) -> None:
    """Short text is unchanged, JSON arguments remain valid JSON, and the result can always be encoded."""
    shortened = truncate_text(text, maximum)
    assert (
        shortened == text
        if len(text) <= maximum
        else len(shortened) <= max(maximum + 50, 2 * maximum)
    )
    shortened.encode()
    json.loads(truncate_json(text, maximum))


@pytest.mark.parametrize("text", ['{"a": NaN}' * 50, "[" * 5_000, '{"n": ' + "9" * 9_000 + "}"])
def test_invalid_json_is_truncated_as_text(text: str) -> None:
    """JSON with NaN, a huge number or excessive nesting is truncated as text, without an exception."""
    assert "left out" in truncate_text(text, 50)


def test_lone_surrogate_is_preserved_as_an_escape() -> None:
    """A lone surrogate in JSON text is written as an escape sequence."""
    text = json.dumps({"a": "\ud800", "b": "x" * 500})
    assert "\\ud800" in truncate_text(text, 400)
