"""The state that a Turn carries: sorted, immutable, and read with care from anywhere."""

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.planning import (
    AnchorRecord,
    ConversationState,
    drop_anchors,
    dump_record,
    get_state,
    load_record,
    set_state,
)
from kedge.planning.state import STATE_KEY, anchor_sort_key
from kedge.turns import Turn, dumps, loads, user
from planning.recorded_turns import records
from strategies import json_values, texts


def states() -> st.SearchStrategy[ConversationState]:
    """States of every kind."""
    return st.builds(
        ConversationState,
        st.sampled_from([None, "chained", "stateless", "conversation"]),
        texts(),
        texts(),
        st.lists(records(), max_size=6).map(tuple),
    )


@given(states())
def test_a_state_survives_the_json_form_of_its_turn(state: ConversationState) -> None:
    """Written with the Turn and read back, twice the same."""
    turn = set_state(Turn([user("a")]), state)
    assert get_state(turn) is state
    again = loads(dumps(turn))
    assert get_state(again) == state
    assert get_state(again).to_json() == state.to_json()
    assert pickle.loads(pickle.dumps(state)) == state  # noqa: S301 - our own bytes


@given(records())
def test_a_record_survives_its_json_form(record: AnchorRecord) -> None:
    """A store may keep records as JSON; members at their default take no room."""
    form = json.loads(json.dumps(dump_record(record)))
    assert load_record(form) == record
    bare = AnchorRecord("R", "s", "d", 1)
    assert dump_record(bare).keys() == {"response_id", "scope", "digest", "block_count"}
    assert dump_record(record).keys() <= {each.name for each in fields(AnchorRecord)}


@given(states(), records())
def test_records_are_sorted_by_reach_and_then_by_age(
    state: ConversationState, record: AnchorRecord
) -> None:
    """Also after one is added, which takes the place of an earlier one of its response."""
    more = state.with_anchor(record)
    for each in (state, more, more.mark_lost(["R1"]), replace(more, mode=None)):
        assert list(each.anchors) == sorted(each.anchors, key=anchor_sort_key)
    others = [
        e for e in state.anchors if (e.response_id, e.scope) != (record.response_id, record.scope)
    ]
    assert sorted(more.anchors, key=repr) == sorted([*others, record], key=repr)
    equals = [e for e in more.anchors if anchor_sort_key(e) == anchor_sort_key(record)]
    assert equals[-1] == record  # what was written down last counts as the newest


@given(states(), records())
def test_what_the_state_knows_of_a_record_is_found(
    state: ConversationState, record: AnchorRecord
) -> None:
    """A record from elsewhere finds its twin, and only that."""
    twin = state.with_anchor(record).find_matching(record)
    assert twin == record
    assert state.with_anchor(record).find_matching(replace(record, scope="c")) is None
    for each in state.anchors:
        found = state.find_matching(each)
        assert found is not None
        assert (found.response_id, found.scope) == (each.response_id, each.scope)


def test_lost_responses_are_marked_and_not_returned_to() -> None:
    """The record stays, for what it proves; an unfinished one stays unfinished."""
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


def test_a_state_finds_a_record_by_its_response() -> None:
    """Or says that there is none."""
    record = AnchorRecord("R1", "s", "d", 1)
    state = ConversationState(anchors=(record,))
    assert state.anchor("R1") is record
    assert state.anchor("R2") is None
    assert state.with_anchors([]) == ConversationState()


@given(json_values())
def test_garbage_in_the_place_of_a_state_is_no_state(garbage: Any) -> None:
    """State that cannot be read costs a full send, never an error."""
    if garbage is not None:
        state = get_state(Turn([user("a")], data={STATE_KEY: garbage}))
        assert isinstance(state, ConversationState)


names = st.sampled_from([each.name for each in fields(AnchorRecord)])


@given(st.dictionaries(names, json_values()))
def test_a_record_that_cannot_be_read_is_left_out(form: dict[str, Any]) -> None:
    """Each member is what it must be, or there is no record."""
    loaded = load_record(form)
    if loaded is not None:
        assert load_record(dump_record(loaded)) == loaded
    state = get_state(Turn(data={STATE_KEY: {"anchors": [form, 3, None]}}))
    assert state.anchors == ((loaded,) if loaded else ())


@pytest.mark.parametrize(
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
def test_one_wrong_member_spoils_a_record(wrong: dict[str, Any]) -> None:
    """Nothing is guessed."""
    form = {"response_id": "R", "scope": "s", "digest": "d", "block_count": 2}
    assert load_record(form) == AnchorRecord("R", "s", "d", 2)
    assert load_record({**form, **wrong}) is None
    assert load_record([form]) is None
    assert load_record({"response_id": "R"}) is None


def test_anchors_of_another_party_can_be_dropped() -> None:
    """Blocks, data and mode stay; everything that names a server's memory goes."""
    record = AnchorRecord("R", "s", "d", 1)
    state = ConversationState("stateless", "R", "conv_1", (record,))
    turn = set_state(Turn([user("Hi")], data={"mine": 1}), state)
    dropped = drop_anchors(loads(dumps(turn)))
    assert get_state(dropped) == ConversationState("stateless")
    assert dropped.blocks == turn.blocks
    assert dropped.data["mine"] == 1
