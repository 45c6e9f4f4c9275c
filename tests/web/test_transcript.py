"""From blocks to messages and exchanges."""

from typing import Any

import pytest

from kedge.store import Node, ResponseRow
from kedge.turns import (
    Block,
    assistant,
    file,
    image,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.web.transcript import (
    format_json,
    render_exchanges,
    render_messages,
    render_ranges,
    split_exchanges,
    summarize_text,
)


def make_node(number: int, parent: int, kind: str, retained: int, length: int) -> Node:
    """A node of a path."""
    return Node(number, 1, 1, parent, 1, kind, retained, length, number)  # pyright: ignore[reportArgumentType]


def make_response(number: int, name: str = "", **members: Any) -> ResponseRow:
    """The response that made a node."""
    return ResponseRow(provider="p", scope="s", node=number, provider_response_id=name, **members)


def summarize_exchanges(path: list[Node], blocks: list[Block], *rows: ResponseRow) -> list[Any]:
    """Exchanges as (node, before, texts asked, texts answered), and what was said afterwards."""
    spans, text = split_exchanges(path, blocks, {row.node: row for row in rows})
    shown: list[Any] = [
        (each.node, each.before, [m.text for m in each.asked], [m.text for m in each.answered])
        for each in render_exchanges(spans, blocks)
    ]
    return [*shown, [message.text for message in render_ranges(text, blocks, {})]]


def test_each_response_ends_an_exchange() -> None:
    """What was said before it was asked, what it added was answered."""
    path = [
        make_node(1, 0, "root", 0, 0), make_node(2, 1, "asked", 0, 1), make_node(3, 2, "answered", 1, 2),
        make_node(4, 3, "added", 2, 3), make_node(5, 4, "asked", 3, 4), make_node(6, 5, "answered", 4, 5),
        make_node(7, 6, "asked", 5, 6),
    ]  # fmt: skip
    blocks = [user("a"), assistant("b"), user("c"), user("d"), assistant("e"), user("f")]
    assert summarize_exchanges(path, blocks, make_response(3), make_response(6)) == [
        (3, 1, ["a"], ["b"]),
        (6, 4, ["c", "d"], ["e"]),
        ["f"],
    ]


def test_retained_blocks_belong_to_their_responses() -> None:
    """A rewritten history is not one long message, and what it replaced is not told twice."""
    path = [
        make_node(1, 0, "root", 0, 0), make_node(2, 1, "asked", 0, 1), make_node(3, 2, "answered", 1, 2),
        make_node(4, 3, "edited", 0, 2), make_node(5, 4, "asked", 2, 3), make_node(6, 5, "answered", 3, 4),
    ]  # fmt: skip
    retained = assistant("b").with_metadata(response_id="resp_3")
    blocks = [user("A"), retained, user("c"), assistant("d")]
    assert summarize_exchanges(
        path, blocks, make_response(3, "resp_3"), make_response(6, "resp_6")
    ) == [
        (3, 0, ["A"], ["b"]),
        (6, 4, ["c"], ["d"]),
        [],
    ]


def test_a_compaction_leaves_only_what_is_left() -> None:
    """Responses of which nothing remains are not told in the chat; the graph shows them."""
    path = [
        make_node(1, 0, "root", 0, 0), make_node(2, 1, "asked", 0, 1), make_node(3, 2, "answered", 1, 2),
        make_node(4, 3, "compacted", 0, 1), make_node(5, 4, "asked", 1, 2), make_node(6, 5, "answered", 2, 3),
    ]  # fmt: skip
    blocks = [user("summary"), user("c"), assistant("d")]
    assert summarize_exchanges(path, blocks, make_response(3, "r3"), make_response(6, "r6")) == [
        (6, 4, ["summary", "c"], ["d"]),
        [],
    ]


def test_failure_without_blocks_is_shown() -> None:
    """With what the server said."""
    path = [
        make_node(1, 0, "root", 0, 0),
        make_node(2, 1, "asked", 0, 1),
        make_node(3, 2, "failed", 1, 1),
    ]
    row = make_response(3, status="refused", error="no such model")
    spans, _ = split_exchanges(path, [user("a")], {3: row})
    (exchange,) = render_exchanges(spans, [user("a")])
    assert exchange.is_trouble
    assert (exchange.status, exchange.error) == ("refused", "no such model")


@pytest.mark.parametrize(
    ("block", "kind", "title", "within"),
    [
        (user("**hi**"), "user", "You", "<strong>hi</strong>"),
        (assistant("*ho*"), "assistant", "Assistant", "<em>ho</em>"),
        (system("Be brief."), "system", "System", "Be brief."),
        (system("Be brief.", role="developer"), "system", "Developer", "Be brief."),
        (reasoning(summary=["Thinking."]), "reasoning", "Reasoning", "Thinking."),
        (reasoning(encrypted_content="x"), "reasoning", "Reasoning", "does not show"),
        (tool_call("add", {"a": 1}, call_id="c"), "tool_call", "add", ""),
        (tool_result("c", "2"), "tool_result", "add", ""),
        (opaque({"type": "web_search_call"}), "opaque", "web_search_call", ""),
    ],
)
def test_every_kind_of_block_is_shown(block: Block, kind: str, title: str, within: str) -> None:
    """Under a title that a person understands."""
    (message,) = render_messages([block], {"c": "add"})
    assert (message.kind, message.title) == (kind, title)
    assert within in message.html


def test_origin_of_block_is_shown() -> None:
    """If it was neither the user nor the engine."""
    (message,) = render_messages([user("x", origin="repair")], {})
    assert message.tags == ("by repair",)


def test_files_and_images_are_named() -> None:
    """And linked only where a link is safe."""
    parts = [file("https://a.example/b.pdf", filename="b.pdf"), image("javascript:alert(1)")]
    (message,) = render_messages([user(parts)], {})
    assert [(each.alt, each.link, each.src) for each in message.images] == [
        ("File: b.pdf", "https://a.example/b.pdf", ""),
        ("Image: javascript:alert(1)", "", ""),
    ]


def test_json_is_laid_out_and_other_text_is_left_alone() -> None:
    """However deep or broken it is."""
    assert format_json('{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert format_json("[" * 5_000) == "[" * 5_000
    assert format_json("42") == "42"
    assert summarize_text("a\n b" + "c" * 200) == "a b" + "c" * 117 + "…"
