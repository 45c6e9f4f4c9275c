"""The digest covers every member that a renderer sends: the list of members is derived from the renderers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidJSON, Unsendable, UnsupportedBlock
from kedge.planning import plan_request, prefix_digest
from kedge.planning.digests import is_copy
from kedge.planning.render import build_input_from_blocks
from kedge.server.schema.items import ASSISTANT_MESSAGE, ITEM_TYPES
from kedge.turns import Turn, assistant, block_from_item, dump_block, load_block, opaque, user
from kedge.wire import anthropic_renderer as anthropic_render
from kedge.wire import chat_renderer as chat_render

CITED = turns.TextPart("Cited.", extra={"citations": [{"type": "page", "cited_text": "x"}]})  # pyright: ignore[reportArgumentType]
COMMON = (
    user(["Hi", turns.ImagePart("https://example.com/a.png")]),
    assistant("Hello."),
    user("Call f."),
    turns.tool_call("f", "{}", call_id="call_1"),
    turns.tool_result("call_1", "42"),
    user("Go on."),
    turns.system("Be brief."),
    user("And?"),
)
TURNS: dict[str, Turn] = {
    "responses": Turn(
        [
            *COMMON,
            user([turns.FilePart(data="data:application/pdf;base64,AA==", filename="a.pdf")]),
            turns.tool_call("g", "free", call_id="call_2", custom=True),
            turns.tool_result("call_2", ["1", "2"], custom=True),
            opaque({"type": "web_search_call", "action": {"type": "search", "query": "x"}}),
            opaque({"type": "mcp_approval_request", "id": "mcpr_1", "name": "f"}),
            opaque({"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}),
        ]
    ),
    "chat": Turn(COMMON),
    "anthropic": Turn(
        [
            user("Search."),
            opaque({"type": "server_tool_use", "id": "srv_1", "name": "search", "input": {"q": 1}}),
            opaque({"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}),
            assistant([CITED]),
            user("Call f."),
            turns.tool_call("f", "{}", call_id="call_1"),
            turns.tool_result("call_1", "42"),
        ]
    ),
}


def _plan(turn: Turn) -> Any:
    return plan_request(turn, scope="", mode="stateless", now=0.0)


RENDERERS: dict[str, Callable[[Turn], list[dict[str, Any]]]] = {
    "responses": lambda turn: build_input_from_blocks(turn.body),
    "chat": lambda turn: chat_render.render_messages(_plan(turn), "chat"),
    "anthropic": lambda turn: anthropic_render.render_messages(_plan(turn), "anthropic"),
}
SCHEMA_NAMES = {
    name.rstrip("!?")
    for members in (ASSISTANT_MESSAGE, *ITEM_TYPES.values())
    if isinstance(members, dict)
    for name in members
}
MEMBER_NAMES = sorted(SCHEMA_NAMES - {"id", "status"} | {"anthropic", "a_new_member"})
"""The names of all members of items, except those that a server adds and a model does not see."""


def change_leaves(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value, each with one text, number or flag changed."""
    match value:
        case dict():
            for name in value:
                yield from ({**value, name: other} for other in change_leaves(value[name]))
        case list():
            for at, member in enumerate(value):
                yield from (
                    [*value[:at], other, *value[at + 1 :]] for other in change_leaves(member)
                )
        case bool():
            yield not value
        case int():
            yield value + 1
        case _:
            yield f"{value}x"


def vary(block: turns.Block) -> Iterator[turns.Block]:
    """Yield variants of a block: every field changed, and every member of an item with two values."""
    identity = {"kind", "id", "metadata", "origin"}
    form = dump_block(block)
    content = {name: value for name, value in form.items() if name not in identity}
    forms = [{**form, **changed} for changed in change_leaves(content)]
    if block.kind != "opaque":
        for name in MEMBER_NAMES:
            forms += [{**form, "item": {name: value}} for value in ("one", {"two": [2]})]
    for each in forms:
        try:
            yield load_block(each)
        except InvalidJSON:  # such as another role
            continue


@for_each("api", TURNS)
def test_digest_covers_every_rendered_member(api: str) -> None:
    """Two Turns that differ in one member have different digests if their requests differ."""
    turn, render = TURNS[api], RENDERERS[api]
    seen: dict[str, str] = {}
    rendered_members = 0
    for block in turn.blocks:
        for variant in [block, *vary(block)]:
            edited = turn.edit(block.id, variant)
            try:
                request = repr(render(edited))
            except (UnsupportedBlock, Unsendable):
                continue
            digest = prefix_digest(edited)
            assert seen.setdefault(digest, request) == request, variant
            rendered_members += request != repr(render(turn))
    assert rendered_members > len(turn)


@for_each(
    "item",
    [
        {"type": "message", "role": "user", "content": "Hi", "name": "Ada"},
        {"type": "message", "role": "developer", "content": "Be brief.", "name": "Ada"},
        {"type": "function_call_output", "call_id": "c", "output": "42", "namespace": "math"},
    ],
)
def test_unknown_members_of_input_are_sent(item: dict[str, Any]) -> None:
    """An unknown member of the program's own item is sent, and is part of the digest."""
    block = block_from_item(item)
    assert turns.item_from_block(block) == item
    plain = block_from_item({k: v for k, v in item.items() if k not in ("name", "namespace")})
    assert prefix_digest(Turn([user("a"), block])) != prefix_digest(Turn([user("a"), plain]))


@for_each("api", ["chat", "anthropic"])
def test_unknown_members_of_input_are_refused_by_other_apis(api: str) -> None:
    """An API without items refuses a user block with members of an item, and names them."""
    block = block_from_item({"type": "message", "role": "user", "content": "Hi", "name": "Ada"})
    with pytest.raises(UnsupportedBlock, match=r"members of an item of another API \(name\)"):
        RENDERERS[api](Turn([block]))


def test_copy_may_lack_members_but_not_contradict_them() -> None:
    """A server's list of its items may lack a member such as ``phase``; another value is a difference."""
    form = dump_block(assistant("Hi"))
    ours, other = (load_block({**form, "item": {"phase": value}}) for value in ("a", "b"))
    assert is_copy(ours, assistant("Hi"))
    assert is_copy(assistant("Hi"), ours)
    assert not is_copy(ours, other)
    assert not is_copy(ours, assistant("Ho"))
