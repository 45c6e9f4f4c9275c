"""Test the cache of upstream responses, which are looked up by content and evicted by age."""

from kedge.planning import AnchorRecord, ConversationState, covered_count, prefix_digest, set_state
from kedge.server.engine_models.engine_model import AnchorCache
from kedge.turns import Turn, assistant, user


def record_anchor(turn: Turn, name: str, **changes: object) -> Turn:
    """Return a Turn whose newest response has this id."""
    record = AnchorRecord(name, "s", prefix_digest(turn), covered_count(turn), **changes)  # pyright: ignore[reportArgumentType]
    return set_state(turn, ConversationState(anchors=(record,)))


FIRST_TURN = Turn([user("One"), assistant("Yes")])


def test_response_is_found_by_its_user_and_context() -> None:
    """Any Turn that starts with the context of a user's response finds it, and the longest context comes first."""
    anchors = AnchorCache(10)
    anchors.record(record_anchor(FIRST_TURN, "r1"), "alice")
    longer = FIRST_TURN.append(user("Two"), assistant("Well"))
    anchors.record(record_anchor(longer, "r2"), "alice")
    rebuilt = Turn([*longer.blocks, user("Three")])
    found = anchors.find_candidates(rebuilt, "alice")
    assert [record.response_id for record in found] == ["r2", "r1"]
    other = Turn([user("One"), assistant("No"), user("Two")])
    for turn, name in ((other, "alice"), (rebuilt, ""), (rebuilt, "bob")):
        assert anchors.find_candidates(turn, name) == ()


def test_lost_or_unstored_responses_are_no_candidates() -> None:
    """Responses that the engine reports as lost or not stored are not candidates."""
    anchors = AnchorCache(10)
    anchors.record(record_anchor(FIRST_TURN, "r1", stored=False))
    assert len(anchors) == 0
    anchors.record(record_anchor(FIRST_TURN, "r1"))
    anchors.record(record_anchor(FIRST_TURN, "r1", status="lost"))
    assert len(anchors) == 0
