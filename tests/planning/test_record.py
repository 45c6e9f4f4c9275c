"""Recording a response: its blocks are tagged, its anchor record is added if valid, and it is found by its tags."""

import random
from collections.abc import Callable

from msgspec import structs

from for_each import for_each
from kedge import planning
from kedge.planning import find_best_anchor, find_running, get_state, invalid_anchor_reason
from kedge.planning.anchors import MAX_STALE_ANCHORS, drop_changed_anchors
from kedge.turns import Block, Source, Turn, assistant, system, tool_call, tool_result, user
from planning import recorded_turns
from planning.recorded_turns import NOW, SCOPE, add_response, call_block, make_exchanges, make_plan


def test_blocks_are_tagged_with_response_and_index() -> None:
    """Tagging sets the response id, output index and origin, and leaves ids and content unchanged."""
    blocks = [
        assistant("a", id="b1"),
        assistant("b", metadata={"mine": 1}, source=Source(output_index=7)),
    ]
    tagged = planning.tag_blocks(blocks, "R1")
    assert tagged == blocks
    assert [block.response_id for block in tagged] == ["R1", "R1"]
    assert [block.origin for block in tagged] == ["engine", "engine"]
    assert tagged[0].id == "b1"
    assert [block.source for block in tagged] == [Source("R1", "", 0), Source("R1", "", 7)]
    assert tagged[1].metadata == {"mine": 1}
    assert planning.tag_blocks(tagged, "")[0].source == Source("R1", "", 0)
    assert planning.tag_blocks(tagged, "R2")[0].source == Source("R2", "", 0)


def test_a_response_becomes_an_anchor() -> None:
    """The anchor record of a response contains everything the next plan needs."""
    blocks = recorded_turns.reasoning_block("a"), recorded_turns.message_block("a")
    turn = add_response(Turn([system("s"), user("u")]), "R1", *blocks)
    state = get_state(turn)
    (record,) = state.anchors
    assert state.previous_response_id == "R1"
    assert (record.response_id, record.scope, record.status) == ("R1", SCOPE, "completed")
    assert (record.digest, record.block_count) == (planning.prefix_digest(turn), 2)
    assert (record.depth, record.root_created_at, record.created_at) == (1, NOW, NOW)
    assert (record.expires_at, record.stored) == (NOW + planning.DEFAULT_RETENTION, True)
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
    turn = planning.record_response(
        turn, [assistant("a")], response_id="R2", plan=planned, created_at=20.0
    )
    assert get_state(turn).anchors[-1].root_created_at == 10.0


def test_response_without_an_id_is_not_an_anchor() -> None:
    """Blocks of a response without an id are appended, and its record is the reason for an older anchor."""
    turn = make_exchanges(1).append(user("u"))
    answered = add_response(turn, "", assistant("nameless"))
    assert answered[-1] == assistant("nameless")
    assert "response_id" not in answered[-1].metadata
    assert get_state(answered).previous_response_id == "R1"
    plan = make_plan(answered.append(user("v")))
    assert (plan.previous_response_id, plan.reason) == ("R1", "")
    assert [(each.response_id, each.reason) for each in plan.rejected] == [("", "no_id")]
    assert "Not used: the last answer, because it came without an id." in plan.explain()


def test_only_the_newest_response_without_an_id_has_a_record() -> None:
    """A server that never sends ids does not fill the state, and an edit of the answer does not hide the reason."""
    turn = make_exchanges(1)
    for text in "uvw":
        turn = add_response(turn.append(user(text)), "", assistant(text.upper()))
    assert [each.status for each in get_state(turn).anchors] == ["completed", "no_id"]
    edited = turn.edit(turn[-1].id, assistant("edited")).append(user("x"))
    assert [each.reason for each in make_plan(edited).rejected] == ["no_id"]


def test_plan_of_another_turn_creates_no_anchor() -> None:
    """If the Turn was edited after planning, the blocks are appended but no anchor is recorded."""
    turn = make_exchanges(1).append(user("u"))
    planned = make_plan(turn)
    other = turn.edit(turn[0].id, user("edited meanwhile"))
    facts = {"response_id": "R2", "plan": planned, "created_at": NOW}
    answered = planning.record_response(other, [assistant("a")], **facts)
    assert answered[-1].response_id == "R2"
    assert get_state(answered).anchor("R2") is None
    assert make_plan(answered).anchor is None


@for_each("status", ["incomplete", "failed", "cancelled", "lost"])
def test_unfinished_response_is_not_the_previous_response(status: str) -> None:
    """An unfinished response is recorded with its status and rejected as an anchor."""
    turn = add_response(make_exchanges(1).append(user("u")), "R2", status=status)
    assert get_state(turn).previous_response_id == "R1"
    rejected = make_plan(turn.append(user("v"))).rejected[0]
    reason = "lost" if status == "lost" else "incomplete"
    assert (rejected.response_id, rejected.reason) == ("R2", reason)


def test_running_response_is_found_by_the_turn_that_it_answers() -> None:
    """A response in the background answers the Turn as it was sent, and no longer one, or one of another provider."""
    sent = Turn([user("u")])
    facts = {"response_id": "R1", "plan": make_plan(sent), "created_at": NOW}
    turn = planning.record_response(sent, [], **facts, status="running")
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
    blocks = (
        recorded_turns.reasoning_block("a"),
        recorded_turns.compaction_block("c"),
        call_block("b"),
    )
    turn = add_response(Turn([user("u")]), "R1", *blocks)
    added = add_response(Turn([user("u"), recorded_turns.compaction_block("d"), user("v")]), "R3")
    later = add_response(turn.append(user("v")), "R2")
    assert [get_state(each).anchors[-1].barrier for each in (turn, later, added)] == [1, 1, 1]
    assert len(get_state(turn).anchors[-1].derived) == 2
    assert get_state(added).anchors[-1].derived == ()


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
    assert len(anchors) <= 2 * (planning.covered_count(turn) + MAX_STALE_ANCHORS)
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


def tagged(*names: str) -> list[Block]:
    """Return blocks of these kinds; an answer or a call may have the letter of a response."""
    make: dict[str, Callable[[str], Block]] = {
        "user": lambda source: user("u"),
        "system": lambda source: system("s"),
        "answer": lambda source: assistant("said", source=Source(source)),
        "call": lambda source: tool_call("f", "{}", call_id="c", source=Source(source)),
        "result": lambda source: tool_result("c", "1"),
    }
    return [make[kind](source) for kind, _, source in (name.partition(" ") for name in names)]


@for_each(
    ("blocks", "response_id", "best", "is_valid", "after"),
    [
        ([], "A", "", False, 0),
        (["user", "system", "result"], "A", "", False, 0),
        (["user", "answer A", "call A"], "A", "A", True, 0),
        (["answer A", "call A", "result"], "A", "A", True, 1),
        (["user", "answer A", "result", "answer B"], "A", "B", True, 2),
        (["user", "answer A", "user", "call A"], "A", "", False, 0),
        (["user", "answer A"], "B", "A", False, 0),
    ],
)
def test_responses_are_found_by_their_tags(
    blocks: list[str], response_id: str, best: str, is_valid: bool, after: int
) -> None:
    """The newest contiguous response is the best anchor, and the blocks after a response are found."""
    turn = Turn(tagged(*blocks))
    assert find_best_anchor(turn) == best
    assert planning.is_valid_anchor(turn, response_id) is is_valid
    assert planning.blocks_after_response(turn, response_id) == list(turn)[len(blocks) - after :]


# Three changes that a lookup by tags considers harmless.
CHANGES: dict[str, Callable[[Turn], Turn]] = {
    "remove a call": lambda turn: turn.remove(turn[3].id),  # the remaining blocks are contiguous
    "edit the answer": lambda turn: turn.edit(
        turn[2].id, assistant("edited", id=turn[2].id, metadata=turn[2].metadata)
    ),
    "edit the message before": lambda turn: turn.edit(turn[1].id, user("redacted")),
}


@for_each("change", CHANGES)
def test_digests_detect_changes_that_tags_do_not(change: str) -> None:
    """A removed call or an edit in or before a response invalidates the anchor, but not its tags."""
    turn = Turn([system("s"), user("u")])
    turn = add_response(turn, "resp_A", recorded_turns.message_block("a"), call_block("a"))
    turn = turn.append(tool_result("call_a", "1"), user("next"))
    assert planning.is_valid_anchor(turn, "resp_A")
    assert make_plan(turn).previous_response_id == "resp_A"
    changed = CHANGES[change](turn)
    assert planning.is_valid_anchor(
        planning.set_state(changed, type(get_state(turn))()), "resp_A"
    )  # tags alone
    assert invalid_anchor_reason(changed, "resp_A") == "changed"
    assert find_best_anchor(changed) == ""
    assert make_plan(changed).anchor is None


def test_anchor_problem_names_the_reason() -> None:
    """``invalid_anchor_reason`` returns the reason why a response is not an anchor, and ``None`` for a valid one."""
    turn = make_exchanges(3)
    assert invalid_anchor_reason(turn, "R3") is None
    assert invalid_anchor_reason(turn, "") == invalid_anchor_reason(turn, "R9") == "unproven"
    split = turn.insert(0, assistant("said", source=Source("R3")))
    assert invalid_anchor_reason(split, "R3") == "split"
    lost = planning.set_state(turn, get_state(turn).mark_lost(["R3"]))
    assert invalid_anchor_reason(lost, "R3") == "lost"
    assert find_best_anchor(lost) == "R2"
    incomplete = add_response(turn.append(user("u")), "R4", status="incomplete")
    assert invalid_anchor_reason(incomplete, "R4") == "incomplete"
    unstored = add_response(turn.append(user("u")), "R4", stored=False)
    assert invalid_anchor_reason(unstored, "R4") == "unstored"
    assert find_best_anchor(unstored) == "R3"


def test_a_turn_without_its_newest_response_is_detached_from_its_object() -> None:
    """A conversation object still has the items of a removed answer, so it is not used any more."""
    turn = make_exchanges(3, conversation_id="conv_1")
    kept = get_state(drop_changed_anchors(turn.append(user("next"))))
    assert (kept.previous_response_id, kept.conversation_id) == ("R3", "conv_1")
    cut = get_state(drop_changed_anchors(turn.take(2)))
    assert [record.response_id for record in cut.anchors] == ["R1", "R3"]
    assert (cut.previous_response_id, cut.conversation_id) == ("R1", "")


def test_tags_on_other_blocks_do_not_move_an_anchor() -> None:
    """The end of a response is defined by its record, even if later blocks have its tag."""
    turn = make_exchanges(2)
    longer = turn.append(assistant("said", source=Source("R2")))
    assert invalid_anchor_reason(longer, "R2") == "changed"
    assert find_best_anchor(longer) == "R1"
