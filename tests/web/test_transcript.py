"""Tests of the conversion of blocks to messages and exchanges."""

from typing import Any

from for_each import for_each
from kedge.store import Node, RequestRecord
from kedge.turns import (
    Block,
    Source,
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
from kedge.web.markdown import PageMarkdown
from kedge.web.transcript import MessageViews, indent_json, split_exchanges, summarize_text


def make_path(*steps: tuple[str, int, int]) -> list[Node]:
    """Return a path of nodes with these kinds, retained blocks and lengths."""
    return [
        Node(number, 1, 1, number - 1, 1, kind, retained, length, number)  # pyright: ignore[reportArgumentType]
        for number, (kind, retained, length) in enumerate([("root", 0, 0), *steps], 1)
    ]


def make_response(number: int, name: str = "", **members: Any) -> RequestRecord:
    """Return the response of a node."""
    return RequestRecord(provider="p", scope="s", node=number, provider_response_id=name, **members)


def summarize_exchanges(path: list[Node], blocks: list[Block], *rows: RequestRecord) -> list[Any]:
    """Return exchanges as (node, before, texts asked, texts answered), and the texts after the last one."""
    messages = MessageViews(blocks)
    exchanges, text = split_exchanges(path, messages, {row.node: row for row in rows})
    transcript: list[Any] = [
        (each.node, each.before, [m.text for m in each.asked], [m.text for m in each.answered])
        for each in exchanges
    ]
    return [*transcript, [message.text for message in messages.render_ranges(text)]]


FIRST = (("asked", 0, 1), ("answered", 1, 2))


def test_each_response_ends_an_exchange() -> None:
    """Blocks before a response are its question; edits retain exchanges, compactions omit them, failures show."""
    path = make_path(*FIRST, ("added", 2, 3), ("asked", 3, 4), ("answered", 4, 5), ("asked", 5, 6))
    blocks = [user("a"), assistant("b"), user("c"), user("d"), assistant("e"), user("f")]
    assert summarize_exchanges(path, blocks, make_response(3), make_response(6)) == [
        (3, 1, ["a"], ["b"]),
        (6, 4, ["c", "d"], ["e"]),
        ["f"],
    ]
    path = make_path(*FIRST, ("edited", 0, 2), ("asked", 2, 3), ("answered", 3, 4))
    retained = assistant("b").with_source(Source("resp_3"))
    blocks = [user("A"), retained, user("c"), assistant("d")]
    rows = make_response(3, "resp_3"), make_response(6, "resp_6")
    exchanges = [(3, 0, ["A"], ["b"]), (6, 4, ["c"], ["d"]), []]
    assert summarize_exchanges(path, blocks, *rows) == exchanges
    path = make_path(*FIRST, ("compacted", 0, 1), ("asked", 1, 2), ("answered", 2, 3))
    blocks = [user("summary"), user("c"), assistant("d")]
    rows = make_response(3, "r3"), make_response(6, "r6")
    assert summarize_exchanges(path, blocks, *rows) == [(6, 4, ["summary", "c"], ["d"]), []]
    path = make_path(("asked", 0, 1), ("failed", 1, 1))
    row = make_response(3, status="refused", error="no such model")
    (exchange,), _ = split_exchanges(path, MessageViews([user("a")]), {3: row})
    assert exchange.is_trouble
    assert (exchange.status, exchange.row) == ("refused", row)


@for_each(
    ("block", "kind", "title", "expected"),
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
def test_every_kind_of_block_is_shown(block: Block, kind: str, title: str, expected: str) -> None:
    """Each kind of block is shown under a readable title."""
    *_, message = MessageViews([tool_call("add", {}, call_id="c"), block]).render()
    assert (message.kind, message.title) == (kind, title)
    assert expected in PageMarkdown().render(message.source)


def test_files_and_images_are_named() -> None:
    """Files and images are labeled and linked if it is safe; an origin other than user and engine is shown."""
    parts = [file("https://a.example/b.pdf", filename="b.pdf"), image("javascript:alert(1)")]
    (message,) = MessageViews([user(parts)]).render()
    assert [(each.alt, each.link, each.src) for each in message.images] == [
        ("File: b.pdf", "https://a.example/b.pdf", ""),
        ("Image: javascript:alert(1)", "", ""),
    ]
    failed = tool_result("c", "no paper", metadata={"kedge.outcome": "failed"})
    views = MessageViews([user("x", origin="repair"), failed]).render()
    assert [message.tags for message in views] == [("by repair",), ("failed",)]


def test_json_is_indented_and_other_text_is_unchanged() -> None:
    """JSON is indented; text that is invalid or nested too deeply is returned unchanged."""
    assert indent_json('{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert indent_json("[" * 5_000) == "[" * 5_000
    assert indent_json("42") == "42"
    assert indent_json(r'["\ud800"]') == '[\n  "\\ud800"\n]'
    assert summarize_text("a\n b" + "c" * 200) == "a b" + "c" * 117 + "…"
