"""Anchor records: matching a prefix of the Turn, expiry, reasons for rejection, and the state that has them."""

import json
import pickle
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from for_each import for_each
from kedge import planning
from kedge.planning import AnchorRecord, ConversationState, Reason, get_state, prefix_digest
from kedge.planning import anchors as anchor_records
from kedge.planning.anchors import (
    STATE_KEY,
    anchor_sort_key,
    dump_record,
    load_record,
    matches_prefix,
    unavailable_reason,
)
from kedge.planning.digests import get_prefix_index
from kedge.turns import Turn, assistant, dumps, loads, reasoning, user
from planning.recorded_turns import records
from strategies import json_values, texts

TURN = Turn([user("a"), reasoning("hm"), assistant("b"), user("c")])
MONTH = 30 * 24 * 3600.0


def make_record(**facts: object) -> AnchorRecord:
    """Return a record of the first two covered blocks, with these fields replaced."""
    known = {"response_id": "R", "scope": "here", "digest": prefix_digest(TURN, 2)}
    return AnchorRecord(**{**known, "block_count": 2, **facts})  # pyright: ignore[reportArgumentType]


@for_each(
    ("facts", "expected"),
    [
        ({}, True),
        ({"block_count": 1}, False),
        ({"block_count": 3}, False),
        ({"block_count": 10**30}, False),
        ({"block_count": 0, "digest": prefix_digest(TURN, 0)}, False),
        ({"block_count": -1}, False),
        ({"digest": ""}, False),
        ({"digest": prefix_digest(TURN, 2).removeprefix("sha256:")}, False),
        ({"digest": prefix_digest(TURN), "block_count": 3}, True),
    ],
)
def test_record_matches_only_its_own_prefix(facts: dict[str, object], expected: bool) -> None:
    """A record matches if its digest is that of the prefix of its length."""
    record, index = make_record(**facts), get_prefix_index(TURN)
    assert matches_prefix(record, index) is expected


def test_record_of_a_longer_turn_does_not_match_the_shorter_one() -> None:
    """A record of a longer Turn does not match the Turn it grew from."""
    longer = TURN.append(user("d"))
    later = make_record(digest=prefix_digest(longer), block_count=4)
    assert matches_prefix(later, get_prefix_index(longer))
    assert not matches_prefix(later, get_prefix_index(TURN))


@for_each(
    ("facts", "now", "expired"),
    [
        ({}, 1e12, False),
        ({"created_at": 1.0, "expires_at": None}, 1e12, False),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH - 3601, False),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH - 3600, True),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH, True),
        # The margin is an hour, or less for a short retention.
        ({"created_at": 0.0, "expires_at": 100.0}, 94.0, False),
        ({"created_at": 0.0, "expires_at": 100.0}, 95.0, True),
        # A chain expires with its root.
        ({"root_created_at": 10.0, "created_at": 50.0, "expires_at": 150.0}, 104.0, False),
        ({"root_created_at": 10.0, "created_at": 50.0, "expires_at": 150.0}, 105.0, True),
        ({"root_created_at": 0.0, "created_at": 50.0, "expires_at": 150.0}, 144.0, False),
        # A record that expires before it was created is always expired.
        ({"created_at": 50.0, "expires_at": 10.0}, 10.0, True),
        ({"created_at": 50.0, "expires_at": 50.0}, 50.0, True),
    ],
)
def test_response_expires_with_a_margin_and_with_its_root(
    facts: dict[str, object], now: float, expired: bool
) -> None:
    """A response that the server may have dropped is expired before its time, and when its root expires."""
    assert anchor_records.is_expired(make_record(**facts), now) is expired


@for_each(
    ("facts", "reason"),
    [
        ({}, None),
        ({"depth": 3}, None),
        ({"depth": 4}, "too_deep"),
        ({"response_id": ""}, "unproven"),
        ({"scope": "there"}, "scope"),
        ({"status": "lost"}, "lost"),
        ({"created_at": 9.0}, "lost"),  # before the server lost its data
        ({"status": "incomplete"}, "incomplete"),
        ({"status": "cancelled"}, "incomplete"),
        ({"stored": False}, "unstored"),
        ({"expires_at": 19.0}, "expired"),
    ],
)
def test_unavailable_response_has_a_reason(facts: dict[str, object], reason: Reason | None) -> None:
    """A response that the server cannot continue from has a reason, independent of the Turn."""
    record = make_record(**{"created_at": 10.0, **facts})
    assert unavailable_reason(record, "here", 20.0, max_depth=3, not_before=10.0) == reason


@for_each(
    ("expires_at", "retention", "limited"),
    [
        (None, None, None),
        (50.0, None, 50.0),
        (None, 30.0, 40.0),
        (50.0, 30.0, 40.0),
        (20.0, 30.0, 20.0),
    ],
)
def test_retention_limits_the_expiry(
    expires_at: float | None, retention: float | None, limited: float | None
) -> None:
    """A response expires with its retention, unless the server drops it before."""
    assert anchor_records.limit_expiry(10.0, expires_at, retention) == limited


@for_each(
    ("body", "hidden"), [({}, False), ({"prompt": None}, False), ({"prompt": {"id": "p"}}, True)]
)
def test_a_stored_prompt_hides_context(body: dict[str, object], hidden: bool) -> None:
    """The messages of a stored prompt are known to the server only."""
    assert anchor_records.has_hidden_context(body) is hidden


def test_every_reason_has_a_message() -> None:
    """Every reason for rejecting a candidate has a message."""
    assert set(planning.REASONS) == set(get_args(Reason))
    for reason, text in planning.REASONS.items():
        assert str(planning.RejectedAnchor("R", reason, make_record())) == f"R: {text}"


@for_each(
    ("text", "is_valid"),
    [
        ("[1200,900,100,0,5,140737488355328]", True),
        ("[1,2,3,4,5]", False),
        ("[1,2,3,4,5,true]", False),
        ("[1.0,2,3,4,5,6]", False),
        ('{"input":1}', False),
    ],
)
def test_token_counts_have_one_form(text: str, is_valid: bool) -> None:
    """Malformed counts are missing."""
    counts = anchor_records.decode_token_counts(text)
    assert counts == (planning.TokenCounts(*json.loads(text)) if is_valid else None)


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
    turn = planning.set_state(Turn([user("a")]), state)
    assert get_state(turn) is state
    restored = loads(dumps(turn))
    assert get_state(restored) == state
    assert get_state(restored).to_json() == state.to_json()
    assert pickle.loads(pickle.dumps(state)) == state  # noqa: S301 - bytes from pickle.dumps above


@given(states(), records())
def test_records_are_sorted_by_length_then_age(
    state: ConversationState, record: AnchorRecord
) -> None:
    """Records stay sorted when one is added, which replaces an earlier one of its response and is found."""
    more = state.with_anchor(record)
    for each in (state, more, more.mark_lost(["R1"]), structs.replace(more, mode=None)):
        assert list(each.anchors) == sorted(each.anchors, key=anchor_sort_key)
    key = (record.response_id, record.scope)
    others = [each for each in state.anchors if (each.response_id, each.scope) != key]
    assert sorted(more.anchors, key=repr) == sorted([*others, record], key=repr)
    equals = [e for e in more.anchors if anchor_sort_key(e) == anchor_sort_key(record)]
    assert equals[-1] == record  # the last record added counts as the newest
    assert more.anchor(*key) == record
    assert more.anchor(record.response_id, "c") is None
    assert more.anchor("R9") is None
    for each in state.anchors:
        matching = state.anchor(each.response_id, each.scope)
        assert matching is not None
        assert (matching.response_id, matching.scope) == (each.response_id, each.scope)


def test_lost_responses_are_marked() -> None:
    """A lost response is marked and no longer the previous response; an incomplete one stays incomplete."""
    statuses = ["completed", "incomplete", "completed"]
    anchors = tuple(AnchorRecord(f"R{n}", "s", "d", n, status=statuses[n - 1]) for n in (1, 2, 3))  # pyright: ignore[reportArgumentType]
    state = ConversationState(None, "R3", "", anchors).mark_lost(["R2", "R3"])
    assert [record.status for record in state.anchors] == ["completed", "incomplete", "lost"]
    assert state.previous_response_id == ""
    retained = ConversationState(None, "R1", "", anchors).mark_lost(["R3"])
    assert retained.previous_response_id == "R1"
    assert retained.mark_lost(["R1"], "elsewhere").anchors == retained.anchors


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
        {"expires_at": 10**400},
        {"created_at": "now"},
        {"stored": 1},
        {"derived": [3]},
        {"barrier": "0"},
        {"digest": None},
    ],
)
def test_record_with_an_invalid_member_is_rejected(wrong: dict[str, Any]) -> None:
    """A record with one invalid member is not loaded, instead of being repaired; only invalid counts are left out."""
    form = {"response_id": "R", "scope": "s", "digest": "d", "block_count": 2}
    assert load_record(form) == AnchorRecord("R", "s", "d", 2)
    assert load_record({**form, **wrong}) is None
    assert load_record({**form, "counted": [1, 2]}) == load_record(form)
    assert load_record([form]) is None
    assert load_record({"response_id": "R"}) is None


def test_drop_anchors() -> None:
    """``drop_anchors`` removes everything that refers to a server, but not the blocks, data and mode."""
    record = AnchorRecord("R", "s", "d", 1)
    state = ConversationState("stateless", "R", "conv_1", (record,))
    turn = planning.set_state(Turn([user("Hi")], data={"mine": 1}), state)
    dropped = planning.drop_anchors(loads(dumps(turn)))
    assert get_state(dropped) == ConversationState("stateless")
    assert dropped.blocks == turn.blocks
    assert dropped.data["mine"] == 1
