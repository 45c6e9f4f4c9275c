"""The response tree of a conversation, and the marks of its nodes."""

from typing import Any

from for_each import for_each
from kedge.presentation.response_tree import ResponseTree, build_response_tree, find_marks
from kedge.store import ConversationRow, Node, RequestRecord
from kedge.store.tree import StoredTree

NOW = 1_000_000.0


def make_node(number: int, parent: int, kind: str, **more: Any) -> Node:
    """Return a node of the tree."""
    members: dict[str, Any] = {"kept": 0, "length": 0, "depth": number, **more}
    return Node(number, 1, 1, parent, 1, kind, **members)  # pyright: ignore[reportArgumentType]


def make_response(number: int, **members: Any) -> RequestRecord:
    """Return the response of a node."""
    fields = {"provider": "p", "scope": "s", "mode": "chained", "anchor": "resp_0", **members}
    return RequestRecord(node=number, **fields)


def make_response_tree(
    *nodes: Node, head: int, responses: tuple[RequestRecord, ...] = (), **questions: str
) -> ResponseTree:
    """Return a response tree; ``n2`` is the text of the question at node 2."""
    texts = {int(name[1:]): text for name, text in questions.items()}
    row = ConversationRow("c", head=head)
    tree = StoredTree(row, nodes, {each.node: each for each in responses}, texts)
    return build_response_tree(tree, NOW)


def test_question_without_answer_is_pending() -> None:
    """A question has a node of its own, with the mark `pending`, only until it is answered."""
    kinds = ["root", "asked", "answered", "results", "answered", "edited", "asked"]
    shown = make_response_tree(
        *(make_node(number, number - 1, kind) for number, kind in enumerate(kinds, 1)),
        head=5, responses=(make_response(3), make_response(5)), n2="First", n7="Second",
    )  # fmt: skip
    found = [(each.id, each.parent, each.marks) for each in shown.nodes]
    assert found == [(3, 0, set()), (5, 3, {"head"}), (6, 5, {"edited"}), (7, 6, {"pending"})]
    assert [shown.nodes[0].label, shown.nodes[3].label] == ["First", "Second"]
    assert shown.sums.responses == 2


@for_each(
    ("kind", "members", "marks"),
    [
        ("answered", {}, {}),
        ("answered", {"status": "lost", "lost_reason": "gone", "healed": "lost"}, {"lost": "gone", "healed": "lost"}),
        ("answered", {"anchor": "", "reason": "lost", "status": "lost"}, {"full": "lost", "lost": ""}),
        ("failed", {"status": "refused", "anchor": "", "reason": "changed"}, {"failed": "refused", "full": "changed"}),
        ("answered", {"status": "cut"}, {"failed": "cut"}),
        ("answered", {"status": "incomplete"}, {"failed": "incomplete"}),
        ("answered", {"status": "cancelled"}, {"cancelled": ""}),
        ("answered", {"expires_at": NOW - 1}, {"expired": ""}),
        ("answered", {"expires_at": NOW + 10}, {"expired": ""}),
        ("answered", {"expires_at": NOW + 86_400}, {}),
        ("merged", {"expires_at": NOW - 1, "stored": False}, {"merged": "", "unstored": ""}),
        ("answered", {"anchor": "", "reason": "new"}, {}),
        ("answered", {"anchor": "", "reason": "changed", "mode": "conversation"}, {"full": "changed"}),
        ("answered", {"anchor": "", "reason": "conversation", "mode": "conversation"}, {}),
        ("answered", {"anchor": "", "reason": "stateless", "mode": "stateless"}, {}),
        ("answered", {"anchor": "", "reason": "never_stores", "mode": "stateless"}, {"full": "never_stores"}),
    ],
)  # fmt: skip
def test_marks_follow_the_response(
    kind: str, members: dict[str, Any], marks: dict[str, str]
) -> None:
    """Each mark of a node is derived from the row of its response, with its reason; the tree shows some of them."""
    row, node = make_response(3, **members), make_node(3, 1, kind)
    assert find_marks(node, row, NOW) == marks
    shown = make_response_tree(make_node(1, 0, "root"), node, head=1, responses=(row,))
    assert shown.nodes[0].marks == marks.keys() - {"healed", "merged", "unstored"}
