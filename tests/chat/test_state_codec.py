"""Compact encoding of blocks and anchors in state bytes."""

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from kedge.chat.state_codec import (
    _ANCHOR_TYPES,
    decode_anchors,
    decode_blocks,
    encode_anchors,
    encode_blocks,
)
from kedge.planning import AnchorRecord
from kedge.turns import (
    AssistantBlock,
    Block,
    FrozenMap,
    TextPart,
    ToolCallBlock,
    UserBlock,
    assistant,
    dump_block,
    load_block,
    tool_call,
    tool_result,
    user,
)
from strategies import blocks


class ResponseIndex:
    """A list of response ids that grows with each new id."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, response_id: str) -> int:
        """Return the index of an id."""
        return self.ids.setdefault(response_id, len(self.ids))


def round_trip(blocks_in: list[Block]) -> list[Block]:
    """Encode and decode blocks."""
    numbers = ResponseIndex()
    encoded = encode_blocks(blocks_in, numbers).text
    return decode_blocks(json.loads(encoded), list(numbers.ids))


def is_identical(one: Block, other: Block) -> bool:
    """Return whether two blocks are equal, including their serialized form."""
    return one == other and dump_block(one) == dump_block(other)


@given(st.lists(blocks(), max_size=5))
def test_any_block_round_trips(block_list: list[Block]) -> None:
    """Content, ids, metadata, origin and uninterpreted members round-trip."""
    assert all(map(is_identical, round_trip(block_list), block_list))


RESPONSE_METADATA = {"response_id": "resp_1", "output_index": 0, "item_id": "msg_1"}


@given(
    st.dictionaries(
        st.sampled_from(["response_id", "output_index", "item_id", "mine"]),
        st.one_of(
            st.sampled_from(["resp_1", "é", ""]), st.integers(-5, 5), st.none(), st.booleans()
        ),
    ),
    st.sampled_from(["user", "engine", "guard"]),
    st.dictionaries(st.sampled_from(["text", "from", "as_is", "other"]), st.text(max_size=3)),
)
def test_unusual_metadata_round_trips(
    metadata: dict[str, object], origin: str, extra: dict[str, object]
) -> None:
    """Any metadata, origin and unknown members round-trip, even if their names are used by the encoding."""
    samples = [
        AssistantBlock((TextPart("x"),), metadata=FrozenMap(metadata), origin=origin),
        UserBlock((TextPart("x"),), metadata=FrozenMap(metadata), origin=origin),
        ToolCallBlock("f", "{}", "call_1", metadata=FrozenMap(metadata), origin=origin),
    ]
    forms = [{**dump_block(block), **extra} for block in samples]
    block_list = [load_block(form) for form in forms]
    assert all(map(is_identical, round_trip(block_list), block_list))


def test_common_blocks_are_short() -> None:
    """A single text is one member, and the metadata of an engine is a list of three values."""
    numbers = ResponseIndex()
    block_list = [
        user("Hello", id="blk_1"),
        assistant("Hi", id="blk_2", origin="engine", metadata=RESPONSE_METADATA),
        tool_call("f", "{}", call_id="c", id="blk_3", origin="engine", metadata=RESPONSE_METADATA),
        tool_result("c", "yes", id="blk_4"),
    ]
    assert json.loads(encode_blocks(block_list, numbers).text) == [
        {"kind": "user", "id": "blk_1", "text": "Hello"},
        {"kind": "assistant", "id": "blk_2", "from": [0, 0, "msg_1"], "text": "Hi"},
        {
            "kind": "tool_call",
            "id": "blk_3",
            "from": [0, 0, "msg_1"],
            "name": "f",
            "arguments": "{}",
            "call_id": "c",
        },
        {"kind": "tool_result", "id": "blk_4", "call_id": "c", "text": "yes"},
    ]
    assert list(numbers.ids) == ["resp_1"]


def records() -> st.SearchStrategy[AnchorRecord]:
    """Generate anchor records."""
    times = st.floats(0, 2e9)
    return st.builds(
        AnchorRecord,
        response_id=st.sampled_from(["resp_1", "resp_2", "resp_3"]),
        scope=st.sampled_from(["openai", "practice", "é"]),
        digest=st.text("0123456789abcdef", min_size=4, max_size=8),
        block_count=st.integers(0, 50),
        depth=st.integers(1, 50),
        root_created_at=times,
        status=st.sampled_from(["completed", "lost", "incomplete"]),
        stored=st.booleans(),
        created_at=times,
        expires_at=st.none() | times,
        barrier=st.none() | st.integers(0, 50),
        derived=st.lists(st.text("0123456789abcdef", max_size=4), max_size=2).map(tuple),
    )


@given(st.lists(records(), max_size=6))
def test_any_anchors_round_trip(anchors: list[AnchorRecord]) -> None:
    """Values equal to those of the previous anchor are omitted and restored."""
    numbers = ResponseIndex()
    encoded = json.loads(encode_anchors(anchors, numbers).text)
    assert decode_anchors(encoded, list(numbers.ids)) == anchors


def test_encoding_covers_every_member_of_an_anchor() -> None:
    """Every member of `AnchorRecord` is part of the encoding."""
    assert list(_ANCHOR_TYPES)[1:] == [each.name for each in fields(AnchorRecord)][1:]


def test_infinite_expiry_is_no_expiry() -> None:
    """An infinite expiry is stored as no expiry, because JSON has no infinity."""
    record = AnchorRecord("resp_1", "s", "sha256:0", 1, expires_at=float("inf"))
    numbers = ResponseIndex()
    encoded = json.loads(encode_anchors([record], numbers).text)
    assert decode_anchors(encoded, list(numbers.ids))[0].expires_at is None
