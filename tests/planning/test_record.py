"""Recording a response: its blocks are tagged and appended, and its anchor record is added if valid."""

import random

import pytest
from msgspec import structs

from kedge.planning import (
    DEFAULT_RETENTION,
    covered_count,
    find_running,
    get_state,
    prefix_digest,
    record_response,
    tag_blocks,
)
from kedge.planning.record import MAX_STALE_ANCHORS
from kedge.turns import Source, Turn, assistant, system, user
from planning.recorded_turns import (
    NOW,
    SCOPE,
    add_response,
    call_block,
    compaction_block,
    make_exchanges,
    make_plan,
    message_block,
    reasoning_block,
)


def test_blocks_are_tagged_with_response_and_index() -> None:
    """Tagging sets the response id, output index and origin, and leaves ids and content unchanged."""
    blocks = [
        assistant("a", id="b1"),
        assistant("b", metadata={"mine": 1}, source=Source(output_index=7)),
    ]
    tagged = tag_blocks(blocks, "R1")
    assert tagged == blocks
    assert [block.response_id for block in tagged] == ["R1", "R1"]
    assert [block.origin for block in tagged] == ["engine", "engine"]
    assert tagged[0].id == "b1"
    assert [block.source for block in tagged] == [Source("R1", "", 0), Source("R1", "", 7)]
    assert tagged[1].metadata == {"mine": 1}


def test_a_response_becomes_an_anchor() -> None:
    """The anchor record of a response contains everything the next plan needs."""
    turn = add_response(
        Turn([system("s"), user("u")]), "R1", reasoning_block("a"), message_block("a")
    )
    state = get_state(turn)
    (record,) = state.anchors
    assert state.previous_response_id == "R1"
    assert (record.response_id, record.scope, record.status) == ("R1", SCOPE, "completed")
    assert (record.digest, record.block_count) == (prefix_digest(turn), 2)
    assert (record.depth, record.root_created_at, record.created_at) == (1, NOW, NOW)
    assert (record.expires_at, record.stored) == (NOW + DEFAULT_RETENTION, True)
    assert (record.barrier, len(record.derived)) == (None, 1)
    assert [block.kind for block in turn] == ["system", "user", "reasoning", "assistant"]


def test_record_contains_chain_depth_and_start() -> None:
    """A chained response has its parent's root and a greater depth; a full send starts a new chain."""
    turn = add_response(Turn([user("u")]), "R1", created_at=10.0)
    turn = add_response(turn.append(user("v")), "R2", created_at=20.0)
    turn = add_response(turn.append(user("w")), "R3", created_at=30.0, mode="stateless")
    rows = [(r.depth, r.root_created_at, r.created_at) for r in get_state(turn).anchors]
    assert rows == [(1, 10.0, 10.0), (2, 10.0, 20.0), (1, 30.0, 30.0)]


def test_parent_without_a_root_counts_as_root() -> None:
    """A parent record from another source without ``root_created_at`` is used as the root."""
    turn = add_response(Turn([user("u")]), "R1", created_at=10.0).append(user("v"))
    planned = make_plan(turn)
    assert planned.anchor is not None
    planned = structs.replace(planned, anchor=structs.replace(planned.anchor, root_created_at=0.0))
    turn = record_response(turn, [assistant("a")], response_id="R2", plan=planned, created_at=20.0)
    assert get_state(turn).anchors[-1].root_created_at == 10.0


def test_response_without_an_id_is_not_an_anchor() -> None:
    """Blocks of a response without an id are appended, and the state does not change."""
    turn = make_exchanges(1).append(user("u"))
    answered = add_response(turn, "", assistant("nameless"))
    assert answered[-1] == assistant("nameless")
    assert "response_id" not in answered[-1].metadata
    assert get_state(answered) == get_state(turn)
    assert make_plan(answered).previous_response_id == "R1"


def test_plan_of_another_turn_creates_no_anchor() -> None:
    """If the Turn was edited after planning, the blocks are appended but no anchor is recorded."""
    turn = make_exchanges(1).append(user("u"))
    planned = make_plan(turn)
    other = turn.edit(turn[0].id, user("edited meanwhile"))
    answered = record_response(
        other, [assistant("a")], response_id="R2", plan=planned, created_at=NOW
    )
    assert answered[-1].response_id == "R2"
    assert get_state(answered).anchor("R2") is None
    assert make_plan(answered).anchor is None


@pytest.mark.parametrize("status", ["incomplete", "failed", "cancelled", "lost"])
def test_unfinished_response_is_not_the_previous_response(status: str) -> None:
    """An unfinished response is recorded with its status and rejected as an anchor."""
    turn = add_response(make_exchanges(1).append(user("u")), "R2", status=status)
    assert get_state(turn).previous_response_id == "R1"
    rejected = make_plan(turn.append(user("v"))).rejected[0]
    assert (rejected.response_id, rejected.reason) == (
        "R2",
        "lost" if status == "lost" else "incomplete",
    )


def test_running_response_is_found_by_the_turn_that_it_answers() -> None:
    """A response in the background answers the Turn as it was sent, and no longer one, or one of another provider."""
    sent = Turn([user("u")])
    turn = record_response(
        sent, [], response_id="R1", plan=make_plan(sent), created_at=NOW, status="running"
    )
    found = find_running(turn)
    assert found is not None
    assert found.response_id == "R1"
    assert find_running(turn, SCOPE) == found
    assert find_running(turn, "elsewhere") is None
    assert find_running(turn.append(user("more"))) is None


def test_responses_without_retention_do_not_expire() -> None:
    """Responses of a server without a retention time do not expire."""
    turn = make_exchanges(1, retention=None).append(user("u"))
    assert make_plan(turn, now=1e12).previous_response_id == "R1"


def test_barrier_is_recorded() -> None:
    """A record contains the index of the compaction in its output or input among the covered blocks."""
    turn = add_response(
        Turn([user("u")]), "R1", reasoning_block("a"), compaction_block("c"), call_block("b")
    )
    assert get_state(turn).anchors[-1].barrier == 1
    assert len(get_state(turn).anchors[-1].derived) == 2
    later = add_response(turn.append(user("v")), "R2")
    assert get_state(later).anchors[-1].barrier == 1
    put = add_response(Turn([user("u"), compaction_block("d"), user("v")]), "R3")
    assert get_state(put).anchors[-1].barrier == 1
    assert get_state(put).anchors[-1].derived == ()


def test_conversation_object_has_its_own_scope() -> None:
    """A chained request never uses a response of a conversation object as its anchor."""
    turn = add_response(Turn([user("u")]), "R1", mode="conversation", conversation_id="conv_1")
    turn = turn.append(user("v"))
    assert get_state(turn).conversation_id == "conv_1"
    planned = make_plan(turn, mode="conversation")
    assert (planned.conversation_id, planned.previous_response_id) == ("conv_1", "")
    assert [block.kind for block in planned.delta] == ["user"]
    assert make_plan(turn).anchor is None
    assert make_plan(turn).fallback == "scope"
    left = add_response(turn, "R2")
    assert get_state(left).conversation_id == ""
    assert make_plan(left.append(user("w")), mode="conversation").anchor is None


def test_number_of_stale_records_is_limited() -> None:
    """Repeated truncation leaves all valid records and only the newest stale ones."""
    turn = make_exchanges(3)
    rng = random.Random(1)
    for number in range(400):
        turn = turn.take(6 + 2 * rng.randrange(3)).append(user(f"take {number}"))
        turn = add_response(turn, f"S{number}", created_at=NOW + number)
        assert make_plan(turn.append(user("next"))).previous_response_id == f"S{number}"
    anchors = get_state(turn).anchors
    assert len(anchors) <= 2 * (covered_count(turn) + MAX_STALE_ANCHORS)
    ids = {record.response_id for record in anchors}
    assert ids >= {"R1", "R2", "R3", "S398", "S399"}
    assert ids.isdisjoint(f"S{number}" for number in range(200))


def test_undone_edit_restores_the_anchor() -> None:
    """A record that does not match after an edit matches again when the edit is undone."""
    turn = make_exchanges(2).append(user("u"))
    edited = turn.edit(turn[0].id, user("edited"))
    edited = add_response(edited, "R3")
    restored = edited.edit(edited[0].id, user("question 1"))
    assert make_plan(restored.append(user("v"))).previous_response_id == "R2"
