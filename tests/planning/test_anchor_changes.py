"""The difference between the anchor records of a Turn and those that are known of its path."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kedge.planning import AnchorRecord, ConversationState, get_state, prefix_digest, set_state
from kedge.planning.anchor_changes import AnchorChanges, apply_changes, compare_anchors, get_key
from kedge.turns import Turn, user

TURN = Turn([user(f"Number {number}.", id=f"blk_{number}") for number in range(6)])


def make_record(number: int) -> AnchorRecord:
    """Return the record of a response after the first blocks of the Turn."""
    digest = prefix_digest(TURN.take(number))
    return AnchorRecord(f"resp_{number}", "scope", digest, number, created_at=float(number))


RECORDS = [make_record(number) for number in range(1, 6)]


def with_records(*records: AnchorRecord) -> Turn:
    """Return the Turn with these records."""
    return set_state(TURN, ConversationState(anchors=records))


edited = st.one_of(
    st.none(),
    st.just("lost"),
    st.just("renamed"),
    st.just("other expiry"),
)


def edit_record(record: AnchorRecord, change: str | None) -> AnchorRecord:
    """Return a record after a change."""
    match change:
        case "lost":
            return replace(record, status="lost")
        case "renamed":
            return replace(record, response_id=f"{record.response_id}_other")
        case "other expiry":
            return replace(record, expires_at=9.0)
        case _:
            return record


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), edited, st.booleans()), max_size=8
    )
)
def test_stored_changes_lead_to_the_records_of_the_turn(
    steps: list[tuple[int, int, str | None, bool]],
) -> None:
    """Records that arrive node by node, with the changes between them, are those of the Turn at the end."""
    known: tuple[AnchorRecord, ...] = ()
    rows: list[tuple[int, AnchorRecord]] = []
    changes: list[tuple[int, AnchorChanges]] = []
    for node, (added, changed, change, drops) in enumerate(steps, 1):
        record = RECORDS[added]
        rows.append((node, record))
        expected = ConversationState(anchors=known).with_anchor(record).anchors
        present = [
            edit_record(each, change) if each is RECORDS[changed] else each for each in expected
        ]
        if drops:
            present = present[1:]
        turn = with_records(*{get_key(each): each for each in present}.values())
        if found := compare_anchors(expected, turn):
            changes.append((node, found))
        known = get_state(turn).anchors
        assert set(apply_changes(rows, changes)) == set(known)


def test_same_records_are_no_change() -> None:
    """Equal records are no change, also if one of them waits for a response with its request."""
    running = replace(RECORDS[0], status="running", request="{}")
    turn = with_records(running, *RECORDS[1:])
    assert not compare_anchors(get_state(turn).anchors, turn)
    assert not compare_anchors([replace(running, request=""), *map(replace, RECORDS[1:])], turn)


def test_removed_records_that_match_nothing_are_no_change() -> None:
    """Engines and compactors remove records of another history; what proves nothing need not be stored."""
    stale = replace(make_record(2), response_id="resp_stale", digest="sha256:00")
    assert not compare_anchors([stale, *RECORDS], with_records(*RECORDS))
    dropped = compare_anchors([stale, *RECORDS], with_records(*RECORDS[1:])).dropped
    assert set(dropped) == {("resp_stale", "scope"), ("resp_1", "scope")}


def test_lost_records_are_named_only() -> None:
    """A record that only became lost is stored by its id."""
    turn = with_records(replace(RECORDS[0], status="lost"), *RECORDS[1:])
    assert compare_anchors(RECORDS, turn) == AnchorChanges(lost=(("resp_1", "scope"),))
