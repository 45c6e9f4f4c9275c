"""Test the lookup of responses by the digests of prefixes, and the anchor index in memory."""

from itertools import chain

from kedge.planning import AnchorRecord, covered_count, prefix_digest
from kedge.planning.anchor_index import (
    MAX_PREFIXES,
    IndexedResponse,
    MemoryAnchorIndex,
    iter_candidates,
    iter_prefix_digests,
    qualify_scope,
)
from kedge.planning.digests import get_prefix_index
from kedge.turns import Block, Turn, assistant, reasoning, system, user

FIRST = Turn([user("One"), assistant("Yes")])
SECOND = FIRST.append(user("Two"), assistant("Well"))
REBUILT = Turn([*SECOND.blocks, user("Three")])


def make_response(turn: Turn, response_id: str, created_at: float = 0.0) -> IndexedResponse:
    """Return the entry of a response whose context is this Turn."""
    digest = prefix_digest(turn)
    return IndexedResponse(
        AnchorRecord(response_id, "s", digest, covered_count(turn), created_at=created_at)
    )


def find_ids(index: MemoryAnchorIndex, turn: Turn, scope: str = "s") -> list[str]:
    """Return the ids of the candidates for a Turn, in order."""
    digests = iter_prefix_digests(get_prefix_index(turn))
    return [entry.record.response_id for entry in iter_candidates(index, scope, digests)]


def test_the_longest_context_is_found_first() -> None:
    """Any Turn that starts with the context of a response finds it, and a Turn with other content does not."""
    index = MemoryAnchorIndex()
    index.add("s", make_response(FIRST, "r1"))
    index.add("s", make_response(SECOND, "r2"))
    assert find_ids(index, REBUILT) == ["r2", "r1"]
    assert find_ids(index, Turn([user("One"), assistant("No"), user("Two")])) == []


def test_namespaces_of_one_scope_share_nothing() -> None:
    """A response is found and lost only in the namespace in which it was added."""
    index = MemoryAnchorIndex()
    alice = qualify_scope("alice", "s")
    bob = qualify_scope("bob", "s")
    index.add(alice, make_response(FIRST, "r1"))
    index.mark_lost(bob, "r1")
    index.mark_lost("s", "r1")
    assert find_ids(index, REBUILT, alice) == ["r1"]
    assert find_ids(index, REBUILT, bob) == []
    assert find_ids(index, REBUILT, "s") == []


def test_the_number_of_responses_of_all_namespaces_is_bounded() -> None:
    """The oldest responses are dropped, whoever added them."""
    index = MemoryAnchorIndex(max_entries=2)
    for name in ("alice", "bob", "carol"):
        index.add(qualify_scope(name, "s"), make_response(FIRST, "r1"))
    assert len(index) == 2
    found = [find_ids(index, REBUILT, qualify_scope(name, "s")) for name in ("alice", "carol")]
    assert found == [[], ["r1"]]


def test_the_loss_of_an_older_response_does_not_hide_a_newer_one_of_equal_content() -> None:
    """A loss removes the response with the id, and not another one with the same context."""
    index = MemoryAnchorIndex()
    index.add("s", make_response(FIRST, "old", created_at=1.0))
    index.add("s", make_response(FIRST, "new", created_at=2.0))
    index.mark_lost("s", "old")
    assert find_ids(index, REBUILT) == ["new"]


def test_digests_of_prefixes_begin_with_the_longest() -> None:
    """Each prefix that a digest covers is yielded once, from the longest to the first block."""
    turn = Turn([system("Be brief."), user("One"), reasoning("Hm."), assistant("Yes")])
    expected = [prefix_digest(turn, count) for count in range(covered_count(turn), 0, -1)]
    prefixes = get_prefix_index(turn)
    assert list(iter_prefix_digests(prefixes)) == expected
    assert list(iter_prefix_digests(prefixes, longest=1)) == expected[-1:]


def test_digests_are_limited_to_possible_ends() -> None:
    """A caller that knows where a response may end gets only the digests of these prefixes."""
    prefixes = get_prefix_index(REBUILT)
    digests = iter_prefix_digests(prefixes, can_end=lambda position: position % 2 == 0)
    assert list(digests) == [prefix_digest(SECOND), prefix_digest(FIRST)]


def test_the_number_of_looked_up_prefixes_is_bounded() -> None:
    """A response is found behind many new blocks, up to the maximum."""
    index = MemoryAnchorIndex()
    index.add("s", make_response(FIRST, "r1"))
    added: list[Block] = [user(f"Note {number}") for number in range(MAX_PREFIXES)]
    assert find_ids(index, Turn([*FIRST.blocks, *added[1:]])) == ["r1"]
    assert find_ids(index, Turn(chain(FIRST.blocks, added))) == []
