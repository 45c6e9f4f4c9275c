"""Test the cache of upstream responses, which are looked up by content and evicted by age."""

from kedge.backends.engine_model import AnchorCache
from kedge.planning import AnchorRecord, ConversationState, covered_count, prefix_digest, set_state
from kedge.turns import Turn, assistant, user


def record_anchor(turn: Turn, name: str, **changes: object) -> Turn:
    """Return a Turn whose newest response has this id."""
    record = AnchorRecord(name, "s", prefix_digest(turn), covered_count(turn), **changes)  # pyright: ignore[reportArgumentType]
    return set_state(turn, ConversationState(anchors=(record,)))


FIRST_TURN = Turn([user("One"), assistant("Yes")])


def test_response_is_found_by_its_context() -> None:
    """Any Turn that starts with the context of a response finds it, and the longest context comes first."""
    anchors = AnchorCache(10)
    anchors.record(record_anchor(FIRST_TURN, "r1"))
    longer = FIRST_TURN.append(user("Two"), assistant("Well"))
    anchors.record(record_anchor(longer, "r2"))
    rebuilt = Turn([user("One"), assistant("Yes"), user("Two"), assistant("Well"), user("Three")])
    assert [record.response_id for record in anchors.find_candidates(rebuilt)] == ["r2", "r1"]
    other = Turn([user("One"), assistant("No"), user("Two")])
    assert anchors.find_candidates(other) == ()


def test_a_response_is_found_by_its_user_only() -> None:
    """The same content sent by another user finds no response."""
    anchors = AnchorCache(10)
    anchors.record(record_anchor(FIRST_TURN, "r1"), "alice")
    assert anchors.find_candidates(FIRST_TURN) == ()
    assert anchors.find_candidates(FIRST_TURN, "bob") == ()
    assert [each.response_id for each in anchors.find_candidates(FIRST_TURN, "alice")] == ["r1"]


def test_lost_or_unstored_responses_are_no_candidates() -> None:
    """Responses that the engine reports as lost or not stored are not candidates."""
    anchors = AnchorCache(10)
    anchors.record(record_anchor(FIRST_TURN, "r1", stored=False))
    assert len(anchors) == 0
    anchors.record(record_anchor(FIRST_TURN, "r1"))
    anchors.record(record_anchor(FIRST_TURN, "r1", status="lost"))
    assert len(anchors) == 0


def test_cache_size_is_bounded() -> None:
    """A full cache evicts its oldest responses first."""
    anchors = AnchorCache(2)
    for number in range(5):
        anchors.record(record_anchor(Turn([user(f"{number}"), assistant("Yes")]), f"r{number}"))
    assert len(anchors) == 2
    assert anchors.find_candidates(Turn([user("0"), assistant("Yes")])) == ()
