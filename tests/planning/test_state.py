"""The conversation state of a Turn: sorted, immutable, and loaded leniently."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from for_each import for_each
from kedge.planning import (
    AnchorRecord,
    ConversationState,
    drop_anchors,
    get_state,
    set_state,
)
from kedge.planning.anchors import STATE_KEY, anchor_sort_key, dump_record, load_record
from kedge.turns import Turn, dumps, loads, user
from planning.recorded_turns import records
from strategies import json_values, texts


def states() -> st.SearchStrategy[ConversationState]:
    """Return a strategy for states with arbitrary values."""
    return st.builds(
        ConversationState,
        st.sampled_from([None, "chained", "stateless", "conversation"]),
        texts(),
        texts(),
        st.lists(records(), max_size=6).map(tuple),
    )


@given(states())
def test_state_json_round_trip(state: ConversationState) -> None:
    """A state is unchanged after a JSON round trip of its Turn and after pickling."""
    turn = set_state(Turn([user("a")]), state)
    assert get_state(turn) is state
    restored = loads(dumps(turn))
    assert get_state(restored) == state
    assert get_state(restored).to_json() == state.to_json()
    assert pickle.loads(pickle.dumps(state)) == state  # noqa: S301 - bytes from pickle.dumps above


@given(records())
def test_record_json_round_trip(record: AnchorRecord) -> None:
    """A record is unchanged after a JSON round trip, and its JSON form omits default values."""
    form = json.loads(json.dumps(dump_record(record)))
    loaded = load_record(form)
    assert loaded == record
    assert loaded is not None
    assert json.dumps(dump_record(loaded)) == json.dumps(dump_record(record))
    minimal = AnchorRecord("R", "s", "d", 1)
    assert dump_record(minimal).keys() == {"response_id", "scope", "digest", "block_count"}
    assert dump_record(record).keys() <= {each.name for each in structs.fields(AnchorRecord)}


@given(states(), records())
def test_records_are_sorted_by_length_then_age(
    state: ConversationState, record: AnchorRecord
) -> None:
    """Records stay sorted when one is added, and it replaces an earlier record of the same response."""
    more = state.with_anchor(record)
    for each in (state, more, more.mark_lost(["R1"]), structs.replace(more, mode=None)):
        assert list(each.anchors) == sorted(each.anchors, key=anchor_sort_key)
    others = [
        e for e in state.anchors if (e.response_id, e.scope) != (record.response_id, record.scope)
    ]
    assert sorted(more.anchors, key=repr) == sorted([*others, record], key=repr)
    equals = [e for e in more.anchors if anchor_sort_key(e) == anchor_sort_key(record)]
    assert equals[-1] == record  # the last record added counts as the newest


@given(states(), records())
def test_record_of_a_response_in_a_scope(state: ConversationState, record: AnchorRecord) -> None:
    """``anchor`` returns the record with the same response id and scope, if there is one."""
    more = state.with_anchor(record)
    assert more.anchor(record.response_id, record.scope) == record
    assert more.anchor(record.response_id, "c") is None
    for each in state.anchors:
        matching = state.anchor(each.response_id, each.scope)
        assert matching is not None
        assert (matching.response_id, matching.scope) == (each.response_id, each.scope)


def test_lost_responses_are_marked() -> None:
    """A lost response is marked and no longer the previous response; an incomplete one stays incomplete."""
    anchors = (
        AnchorRecord("R1", "s", "d", 1),
        AnchorRecord("R2", "s", "d", 2, status="incomplete"),
        AnchorRecord("R3", "s", "d", 3),
    )
    state = ConversationState(None, "R3", "", anchors).mark_lost(["R2", "R3"])
    assert [record.status for record in state.anchors] == ["completed", "incomplete", "lost"]
    assert state.previous_response_id == ""
    retained = ConversationState(None, "R1", "", anchors).mark_lost(["R3"])
    assert retained.previous_response_id == "R1"


def test_find_record_by_response_id() -> None:
    """``anchor`` returns the record of a response, or ``None``."""
    record = AnchorRecord("R1", "s", "d", 1)
    state = ConversationState(anchors=(record,))
    assert state.anchor("R1") is record
    assert state.anchor("R2") is None


@given(json_values())
def test_invalid_state_is_ignored(garbage: Any) -> None:
    """A state that cannot be parsed causes a full send, not an error."""
    if garbage is not None:
        state = get_state(Turn([user("a")], data={STATE_KEY: garbage}))
        assert isinstance(state, ConversationState)


names = st.sampled_from([each.name for each in structs.fields(AnchorRecord)])


@given(st.dictionaries(names, json_values()))
def test_invalid_record_is_ignored(form: dict[str, Any]) -> None:
    """A record with an invalid member is left out of the state."""
    loaded = load_record(form)
    if loaded is not None:
        assert load_record(dump_record(loaded)) == loaded
    state = get_state(Turn(data={STATE_KEY: {"anchors": [form, 3, None]}}))
    assert state.anchors == ((loaded,) if loaded else ())


@for_each(
    "wrong",
    [
        {"response_id": 3},
        {"block_count": True},
        {"block_count": "2"},
        {"block_count": 2.0},
        {"expires_at": 10**400},
        {"created_at": "now"},
        {"created_at": True},
        {"stored": 1},
        {"derived": "abc"},
        {"derived": [3]},
        {"barrier": "0"},
        {"digest": None},
    ],
)
def test_record_with_an_invalid_member_is_rejected(wrong: dict[str, Any]) -> None:
    """A record with one invalid member is not loaded, instead of being repaired."""
    form = {"response_id": "R", "scope": "s", "digest": "d", "block_count": 2}
    assert load_record(form) == AnchorRecord("R", "s", "d", 2)
    assert load_record({**form, **wrong}) is None
    assert load_record([form]) is None
    assert load_record({"response_id": "R"}) is None


@pytest.mark.parametrize("counts", [[1], [1, 2, 3, 4, 5, "6"], [1, 2, 3, 4, 5, True], "123456", {}])
def test_malformed_token_counts_are_missing(counts: object) -> None:
    """A record with malformed token counts is loaded without them, because they prove nothing alone."""
    form = {"response_id": "R", "scope": "s", "digest": "d", "block_count": 2}
    assert load_record({**form, "counted": counts}) == AnchorRecord("R", "s", "d", 2)


def test_drop_anchors() -> None:
    """``drop_anchors`` removes everything that refers to a server, but not the blocks, data and mode."""
    record = AnchorRecord("R", "s", "d", 1)
    state = ConversationState("stateless", "R", "conv_1", (record,))
    turn = set_state(Turn([user("Hi")], data={"mine": 1}), state)
    dropped = drop_anchors(loads(dumps(turn)))
    assert get_state(dropped) == ConversationState("stateless")
    assert dropped.blocks == turn.blocks
    assert dropped.data["mine"] == 1
