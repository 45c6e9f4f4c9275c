"""From the tree of a store to the graph of a page."""

from typing import Any

import pytest

from kedge.store import ConversationRow, Node, ResponseRow
from kedge.store.listing import StoredTree
from kedge.web.chain_graph import Totals, build_chain_graph, is_fallback

NOW = 1_000_000.0


def make_node(number: int, parent: int, kind: str, **more: Any) -> Node:
    """A node of the tree."""
    members: dict[str, Any] = {"kept": 0, "length": 0, "depth": number, **more}
    return Node(number, 1, 1, parent, 1, kind, **members)  # pyright: ignore[reportArgumentType]


def make_response(number: int, **members: Any) -> ResponseRow:
    """The response that made a node."""
    given = {"provider": "p", "scope": "s", "mode": "chained", "anchor": "resp_0", **members}
    return ResponseRow(node=number, **given)


def make_chain(
    *nodes: Node, head: int, responses: tuple[ResponseRow, ...] = (), **asked: str
) -> Any:
    """The graph of a tree."""
    said = {int(name[1:]): words for name, words in asked.items()}
    row = ConversationRow("c", head=head)
    return build_chain_graph(
        StoredTree(row, nodes, {each.node: each for each in responses}, said), NOW
    )


def test_questions_are_told_by_their_answers() -> None:
    """A question has no place of its own; its words are the label of what answered it."""
    made = make_chain(
        make_node(1, 0, "root"), make_node(2, 1, "asked"), make_node(3, 2, "answered"), make_node(4, 3, "asked"),
        make_node(5, 4, "answered"), make_node(6, 5, "results"), make_node(7, 6, "answered"),
        head=7, responses=(make_response(3), make_response(5), make_response(7)), n2="First", n4="Second",
    )  # fmt: skip
    assert [(each.id, each.parent, each.label) for each in made.nodes] == [
        ("3", "", "First"),
        ("5", "3", "Second"),
        ("7", "5", "After the tools answered"),
    ]
    assert made.head == "7"
    assert made.sums.responses == 3


def test_a_question_that_led_nowhere_is_pending() -> None:
    """On its way, or stopped: it is shown where it was asked."""
    made = make_chain(
        make_node(1, 0, "root"), make_node(2, 1, "asked"), make_node(3, 2, "answered"), make_node(4, 3, "asked"),
        head=3, responses=(make_response(3),), n2="First", n4="Second",
    )  # fmt: skip
    assert [(each.id, each.label, each.marks) for each in made.nodes] == [
        ("3", "First", {"head"}),
        ("4", "Second", {"pending"}),
    ]


@pytest.mark.parametrize(
    ("members", "marks"),
    [
        ({}, set[str]()),
        ({"status": "lost"}, {"lost"}),
        ({"status": "refused"}, {"failed"}),
        ({"status": "cut"}, {"failed"}),
        ({"status": "incomplete"}, {"failed"}),
        ({"expires_at": NOW - 1}, {"expired"}),
        ({"expires_at": NOW + 10}, {"expired"}),
        ({"expires_at": NOW + 86_400}, set[str]()),
        ({"expires_at": NOW - 1, "stored": False}, set[str]()),
        ({"anchor": "", "reason": "new"}, set[str]()),
        ({"anchor": "", "reason": "changed"}, {"full"}),
        ({"anchor": "", "reason": "stateless", "mode": "stateless"}, set[str]()),
        ({"anchor": "", "reason": "gone", "status": "lost"}, {"full", "lost"}),
    ],
)
def test_marks_tell_how_a_response_stands(members: dict[str, Any], marks: set[str]) -> None:
    """Each from what its row says."""
    row = make_response(3, **members)
    made = make_chain(
        make_node(1, 0, "root"), make_node(3, 1, "answered"), head=1, responses=(row,)
    )
    assert made.nodes[0].marks == marks
    assert is_fallback(row) is ("full" in marks)


def test_edits_and_compactions_have_their_places() -> None:
    """They change history, so they are seen, and add nothing up."""
    made = make_chain(
        make_node(1, 0, "root"), make_node(2, 1, "edited"), make_node(3, 2, "compacted"), make_node(4, 3, "merged"),
        head=4,
    )  # fmt: skip
    assert [each.label for each in made.nodes] == [
        "History was edited",
        "History was compacted",
        "A summary was merged in",
    ]
    assert [each.marks for each in made.nodes] == [{"edited"}, {"compacted"}, {"head"}]
    assert made.sums == Totals()


def test_a_conversation_without_a_word_has_no_graph() -> None:
    """Only the root, which is nothing to show."""
    made = make_chain(make_node(1, 0, "root"), head=1)
    assert (made.nodes, made.head) == ((), "")
