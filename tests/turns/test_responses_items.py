"""Converting blocks to items of the Responses API and back, and which fields of an item are content."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from for_each import for_each
from kedge import turns
from kedge.errors import InvalidTurn, KedgeError, UnsupportedBlock
from kedge.turns import assistant, block_from_item, item_from_block, opaque, reasoning, system, user
from kedge.turns.frozen_json import freeze, thaw
from kedge.turns.responses_items import REQUIRED_ID_PREFIXES, STATUS_REQUIRED
from kedge.turns.server_fields import (
    ID_IS_CONTENT,
    STATUS_IS_CONTENT,
    drop_nulls,
    strip_server_fields,
)
from strategies import blocks, json_objects, json_values, known_blocks, opaque_items


def has_nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(member is None or has_nulls(member) for member in value.values())
    return isinstance(value, list) and any(map(has_nulls, value))


def block_has_nulls(block: turns.Block) -> bool:
    return any(
        has_nulls(turns.dump_block(turns.UserBlock((p,)))["parts"])
        for p in getattr(block, "parts", ())
    )


@given(known_blocks())
def test_block_item_round_trip(block: turns.Block) -> None:
    """Every kind of block that can be sent is equal after conversion to an item and back."""
    assume(not block_has_nulls(block))
    restored = block_from_item(item_from_block(block))
    assert type(restored) is type(block)
    assert restored == block


@given(known_blocks())
def test_item_block_round_trip(block: turns.Block) -> None:
    """An item that is read and sent again is unchanged, with or without nulls."""
    item = item_from_block(block)
    restored = item_from_block(block_from_item(item))
    carried = {"phase", "namespace", "caller", "async"}
    if item["type"] in REQUIRED_ID_PREFIXES:
        carried.add("id")  # generated, and different for each block
    assert {k: v for k, v in restored.items() if k not in carried} == {
        k: v for k, v in item.items() if k not in carried
    }


@given(known_blocks())
def test_items_have_no_nulls_status_or_ids(block: turns.Block) -> None:
    """Items contain no nulls, statuses, ids or local fields, apart from the listed exceptions."""
    item = item_from_block(block)
    assert not has_nulls(item)
    assert "status" not in item or item["type"] in STATUS_IS_CONTENT | STATUS_REQUIRED
    assert "id" not in item or item["type"] in ID_IS_CONTENT | REQUIRED_ID_PREFIXES.keys()
    local = replace(
        block, id="local-marker", origin="origin-marker", metadata=turns.FrozenMap(m="marker")
    )
    assert "marker" not in json.dumps(item_from_block(local))


@given(blocks(), st.sampled_from(["completed", "in_progress", None]))
def test_fields_added_by_a_server_are_ignored(block: turns.Block, status: Any) -> None:
    """A server's id, status and nulls do not change the block; the id is stored in its metadata."""
    assume(block.kind not in {"unknown", "opaque"} and not block_has_nulls(block))
    item = {**item_from_block(block), "id": "item_1", "status": status, "new": None}
    received = block_from_item(item, origin="engine", source=turns.Source("resp_1"))
    assert received == block
    assert (received.item_id, received.response_id, received.origin) == (
        "item_1",
        "resp_1",
        "engine",
    )
    assert item_from_block(received).keys() & {"id", "status", "new"} == set()


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c"}
TEXT = {"type": "input_text", "text": "a"}
ANSWER = {"type": "output_text", "text": "a"}
IMAGE: dict[str, Any] = {"type": "input_image", "image_url": "u"}
ITEMS: list[tuple[dict[str, Any], turns.Block]] = [
    ({"role": "user", "content": "hi"}, user("hi")),
    ({"type": None, "role": "assistant", "content": "hi"}, assistant("hi")),
    (message("developer", TEXT), system("a", "developer")),
    (message("user", {**ANSWER, "annotations": []}), user("a")),
    (message("assistant", TEXT), assistant("a")),
    ({"role": "assistant", "content": [{"type": "text", "text": "a"}]}, assistant("a")),
    (message("user", {**IMAGE, "detail": "auto"}), user(turns.ImagePart("u"))),
    (
        message("user", {**IMAGE, "file_id": "f", "image_url": None}),
        user(turns.ImagePart(file_id="f")),
    ),
    (CALL, turns.tool_call("f", "{}", call_id="c")),
    ({**RESULT, "output": "42"}, turns.tool_result("c", "42")),
    ({**RESULT, "output": [TEXT]}, turns.tool_result("c", "a")),
    (
        {"type": "custom_tool_call_output", "call_id": "c", "output": []},
        turns.ToolResultBlock("c", (), custom=True),
    ),
    (
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        reasoning(text="t"),
    ),
    (
        {"type": "reasoning", "summary": None, "content": None, "encrypted_content": None},
        turns.ReasoningBlock(),
    ),
    ({"id": "msg_1"}, opaque({"type": "item_reference", "id": "msg_1"})),
]


@for_each(("item", "block"), ITEMS)
def test_every_form_of_an_item_is_accepted(item: Any, block: turns.Block) -> None:
    """Short messages, both names of text parts, and references without a type are accepted."""
    assert block_from_item(item) == block
    assert block_from_item(freeze(item)) == block


NO_CONTENT = {"type": "message", "role": "user"}
WITHOUT_CALL_ID = {"type": "function_call", "name": "f", "arguments": "{}"}
ODD_ITEMS: list[dict[str, Any]] = [
    {"type": "message"},
    NO_CONTENT,
    *({**NO_CONTENT, "content": each} for each in (None, 5, TEXT, ["a"], [None])),
    *({"type": "message", "role": each, "content": "a"} for each in ("critic", ["user"], None)),
    *(message("system", *each) for each in ([], [TEXT, TEXT], [IMAGE], [{**TEXT, "cache": True}])),
    {"type": "function_call", "call_id": "c", "name": "f"},
    {**CALL, "arguments": {"a": 1}},
    {**CALL, "name": None},
    {**CALL, "call_id": ""},
    WITHOUT_CALL_ID,
    {**CALL, "type": "custom_tool_call"},
    RESULT,
    {**RESULT, "output": None},
    {"type": "function_call_output", "output": "a"},
    {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None}},
    {"type": "", "a": 1},
]


@for_each("item", ODD_ITEMS)
def test_a_known_item_of_unknown_shape_is_preserved(item: Any) -> None:
    """An item of a known type but unknown shape becomes an opaque block with all its members."""
    block = block_from_item({**item, "id": "i_1", "status": "completed"})
    assert isinstance(block, turns.OpaqueBlock)
    assert block.item == {**item, "id": "i_1", "status": "completed"}
    assert block.item_id == "i_1"
    assert block == opaque(item)
    assert turns.load_block(turns.dump_block(block)) == block


ODD_PARTS: list[dict[str, Any]] = [
    {},
    {"type": 5},
    {"type": "input_text"},
    {"type": "input_text", "text": "a", "cache": True},
    {"type": "output_text", "text": ["a"]},
    {"type": "input_image"},
    {"type": "input_image", "image_url": {"url": "u"}},
    *({**IMAGE, **more} for more in ({"file_id": "f"}, {"file_id": 0}, {"size": 1})),
    {"type": "input_file", "filename": "n"},
    {"type": "input_file", "file_url": "u", "detail": "low"},
    {"type": "input_audio", "data": "x"},
    {"type": "refusal", "refusal": "only a model can refuse"},
]


@for_each("part", ODD_PARTS)
def test_a_part_of_unknown_shape_is_preserved(part: Any) -> None:
    """A part of unknown shape becomes an opaque part, and the text next to it remains a text part."""
    for item in (
        {"type": "message", "role": "user", "content": [TEXT, part]},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT, part]},
    ):
        block = block_from_item(item)
        assert isinstance(block, turns.UserBlock | turns.ToolResultBlock)
        assert block.parts == (turns.TextPart("a"), turns.OpaquePart(turns.FrozenMap(part)))
        assert item_from_block(block) == item
        assert turns.load_block(turns.dump_block(block)) == block


def test_nulls_in_a_part_are_dropped() -> None:
    """A part with null members equals the part without them."""
    nulls = {"type": "input_audio", "data": None, "meta": {"a": None, "b": [None]}}
    plain = {"type": "input_audio", "meta": {"b": [None]}}
    read = [block_from_item(message("user", part)) for part in (nulls, plain)]
    assert read[0] == read[1]
    assert item_from_block(read[0])["content"] == [plain]


def test_assistant_message_with_an_image() -> None:
    """A part that is unsupported in an assistant message is stored next to its text."""
    item = message("assistant", ANSWER, {"type": "output_image", "image_url": "u"})
    block = block_from_item(item)
    assert isinstance(block, turns.AssistantBlock)
    assert block.text == "a"
    assert item_from_block(block) == item


ODD_REASONING: list[dict[str, Any]] = [
    {"summary": "abc"},
    {"summary": ["abc"]},
    {"summary": [{"type": "summary_text"}]},
    {"summary": [{"type": "summary_text", "text": "a", "score": 1}]},
    {"content": {"a": 1}},
    {"content": [{"type": "reasoning_text", "text": 5}]},
    {"encrypted_content": {"a": 1}},
]


@for_each("members", ODD_REASONING)
def test_reasoning_stays_reasoning_in_any_shape(members: Any) -> None:
    """Reasoning of unknown shape is a reasoning block with the unknown members in ``extra``."""
    block = block_from_item({"type": "reasoning", **members, "encrypted_content": "e", **members})
    assert isinstance(block, turns.ReasoningBlock)
    assert block.summary == block.texts == ()
    assert block.extra == {"item": members}
    assert turns.load_block(turns.dump_block(block)).extra == {"item": members}


def test_unknown_members_of_a_known_item_are_stored() -> None:
    """Phase, namespace, caller and async are sent again; other members are only stored in ``extra``."""
    content = [{"type": "output_text", "text": "a"}]
    reported = {"type": "message", "role": "assistant", "phase": "commentary", "content": content}
    block = block_from_item({**reported, "mood": "good", "status": "completed", "agent": None})
    assert block.extra == {"item": {"phase": "commentary", "mood": "good"}}
    assert item_from_block(block) == reported
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    carried = {"namespace": "n", "caller": {"type": "direct"}, "async": True}
    block = block_from_item(
        {**call, **carried, "caller": {"type": "direct", "id": None}, "input": 1}
    )
    assert block.extra["item"]["input"] == 1
    assert item_from_block(block) == {**call, **carried}
    assert item_from_block(turns.load_block(turns.dump_block(block))) == {**call, **carried}
    recorded = block_from_item({**call, "mood": 1}, extra={"mine": 2})
    assert recorded.extra == {"mine": 2, "item": {"mood": 1}}


def test_hosted_tool_item_is_sent_with_a_generated_id() -> None:
    """An item type that requires an id is sent with a generated one instead of the server's."""
    item = {"type": "file_search_call", "id": "fs_theirs", "status": "completed", "queries": ["x"]}
    block = block_from_item(item)
    sent = item_from_block(block)
    assert sent == {**item, "id": sent["id"]}
    assert sent["id"].startswith("fs_")
    assert sent["id"] != "fs_theirs"
    assert block.id not in sent["id"]
    assert item_from_block(block) == sent
    assert block_from_item(sent) == block
    assert block_from_item(item, source=turns.Source(item_id="ours")).item_id == "ours"
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    assert item_from_block(opaque(search)) == {"type": "web_search_call", "status": "completed"}


def test_annotations_are_stored_and_sent_again() -> None:
    """Annotations of a text are stored in the part's ``extra``; those of this API are sent, without nulls."""
    own = {"type": "url_citation", "url": "https://example.com", "title": None}
    chat = {"type": "url_citation", "url_citation": {"url": "https://example.com"}}
    annotations = [own, chat, {"type": "file", "file": {"hash": "a"}}]
    content = [{"type": "output_text", "text": "a", "annotations": annotations, "logprobs": []}]
    block = block_from_item({"type": "message", "role": "assistant", "content": content})
    assert isinstance(block, turns.AssistantBlock)
    assert block == assistant("a")
    assert block.parts[0].extra == {"annotations": annotations}
    sent = {"type": "url_citation", "url": "https://example.com"}
    expected = {"type": "output_text", "text": "a", "annotations": [sent]}
    assert item_from_block(block)["content"] == [expected]


NAMES = st.sampled_from(
    ["type", "role", "content", "id", "call_id", "name", "arguments", "input", "output", "summary"]
)
TYPES = st.sampled_from(
    ["message", "function_call", "custom_tool_call", "function_call_output", "reasoning", "user",
     "assistant", "system", "output_text", "input_text", "input_image", "summary_text"]
)  # fmt: skip
PARTLIKE = st.dictionaries(
    st.sampled_from(["type", "text", "image_url", "refusal"]), TYPES | json_values()
)


@given(st.dictionaries(NAMES, TYPES | st.lists(PARTLIKE) | json_values()) | json_objects())
def test_any_item_gives_a_block_or_invalid_turn(item: Any) -> None:
    """An item with arbitrary members gives a block that can be stored and sent, or ``InvalidTurn``."""
    try:
        block = block_from_item(item)
    except InvalidTurn:
        assert not isinstance(item.get("type"), str)
        return
    assert turns.load_block(turns.dump_block(block)) == block
    assert not has_nulls(item_from_block(block))


NOT_ITEMS: list[Any] = [
    *(None, 5, "text", ["type"]),
    *({}, {"content": "a"}, {"type": 5}, {"type": ["message"]}, {"type": {}}),
    {"type": "message", "role": "user", "content": "\ud800"},
    {"type": "x", "a": float("nan")},
    {"type": "x", "a": object()},
    {"type": "message", "role": "user", "content": "a", 5: 5},
]


@for_each("item", NOT_ITEMS)
def test_invalid_item_is_rejected(item: Any) -> None:
    """A value without a type, or that is not JSON, raises an error."""
    with pytest.raises(KedgeError):
        block_from_item(item)


def test_unsupported_block_raises() -> None:
    """An unknown block and a refusal in a user message raise ``UnsupportedBlock``."""
    with pytest.raises(UnsupportedBlock, match=r"block b_1 is of a kind .*'dream'.* upgrade Kedge"):
        item_from_block(turns.load_block({"kind": "dream", "id": "b_1"}))
    with pytest.raises(UnsupportedBlock, match="a refusal is only possible"):
        item_from_block(user(turns.RefusalPart("no")))


@given(json_values())
def test_null_members_are_dropped(value: Any) -> None:
    """Null members are removed at any depth, and nulls in lists remain."""
    cleaned = thaw(drop_nulls(turns.FrozenMap(a=value)))
    assert not has_nulls(cleaned)
    if not has_nulls({"a": value}):
        assert turns.FrozenMap(cleaned) == turns.FrozenMap(a=value)
    assert thaw(drop_nulls(turns.FrozenMap(a=[None, 1, None]))) == {"a": [None, 1, None]}


@given(opaque_items())
def test_id_and_status_are_stripped_unless_content(item: Any) -> None:
    """The id and status are removed except for the listed types, and all other members remain."""
    retained = strip_server_fields(turns.FrozenMap(item))
    visible = {"type", *(k for k, v in item.items() if v is not None)}
    hidden = {
        *([] if item["type"] in ID_IS_CONTENT else ["id"]),
        *([] if item["type"] in STATUS_IS_CONTENT else ["status"]),
    }
    assert retained.keys() == visible - hidden
    assert strip_server_fields(retained) == retained


def test_image_id_is_content_without_a_result() -> None:
    """The id of a generated image without a result is content, because a client edits the image by id."""
    item = {"type": "image_generation_call", "id": "ig_1", "status": "completed"}
    first, second = turns.FrozenMap(item), turns.FrozenMap({**item, "id": "ig_2"})
    assert strip_server_fields(first) != strip_server_fields(second)
    assert item_from_block(turns.OpaqueBlock(first))["id"] == "ig_1"
    assert "id" not in strip_server_fields(turns.FrozenMap({**first, "result": "aGk="}))
