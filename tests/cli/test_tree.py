"""What a tree tells of each node: marks in plain words, and the heads that stand there."""

from dataclasses import replace
from typing import Any

import pytest

from kedge.cli.tree import AnnotatedTree, describe_mark, render_tree
from kedge.store import ConversationRow, Node, ResponseRow
from kedge.turns import assistant

NOW = 1_000.0
RESPONSE_ROW = ResponseRow(
    provider="p", scope="s", provider_response_id="resp_1", expires_at=2_000.0
)


def make_tree(kind: Any = "answered", **changes: Any) -> AnnotatedTree:
    """A root and one node, made by a response with these members."""
    row = ConversationRow("conv_1", "harbour", head=2, tree=1)
    nodes = [
        Node(1, 1, 1, 0, 1, "root", 0, 0, 0),
        Node(2, 1, 1, 1, 1, kind, 0, 1, 1),
    ]
    other = replace(row, id="conv_2", title="quay")
    made = {2: replace(RESPONSE_ROW, **changes)}
    return AnnotatedTree(
        row, {n.id: n for n in nodes}, [row, other], made, {2: assistant("Hello there")}
    )


@pytest.mark.parametrize(
    ("kind", "changes", "marks"),
    [
        ("answered", {}, []),
        ("answered", {"expires_at": 999.0}, ["expired"]),
        ("answered", {"expires_at": 1_020.0, "created_at": 0.5}, ["expired"]),  # within the margin
        ("answered", {"expires_at": None}, []),
        ("answered", {"status": "lost", "lost_reason": "gone"}, ["lost: gone"]),
        ("answered", {"status": "lost"}, ["lost"]),
        ("answered", {"stored": False}, ["unstored"]),
        ("answered", {"healed": "gone", "reason": "gone"}, ["healed: gone"]),
        ("answered", {"reason": "changed"}, ["sent in full: changed"]),
        ("answered", {"reason": "new"}, []),
        ("failed", {"status": "refused"}, ["failed: refused"]),
        ("compacted", {}, ["compacted"]),
        ("edited", {}, ["edited"]),
    ],
)
def test_marks_tell_what_became_of_a_response(
    kind: str, changes: dict[str, Any], marks: list[str]
) -> None:
    """One mark for each thing worth knowing, and none where all is well."""
    made = make_tree(kind, **changes)
    assert made.marks(2, NOW) == marks
    first, last = render_tree(made, NOW)
    assert all(f"[{describe_mark(mark)}]" in first for mark in marks)
    assert "(head)" in first
    assert "(head of quay)" in first
    assert "Hello there" in first
    assert last.endswith("root")


def test_reasons_of_marks_are_sentences() -> None:
    """A reader needs no knowledge of the codes; an unknown one is shown as it is."""
    assert describe_mark("lost: gone") == "lost: the server no longer has this response"
    resent = "the server no longer had the earlier response; the full conversation was resent"
    assert describe_mark("healed: gone") == resent
    assert describe_mark("healed: new reason") == "healed: new reason"
    assert describe_mark("lost") == "lost"
    assert "818 B sent" in render_tree(make_tree(request_bytes=818), NOW)[0]


def test_the_report_has_all_of_it() -> None:
    """For scripts, the oldest first."""
    told = make_tree(status="lost").to_json(NOW)
    root, node = told["nodes"]
    assert root["response"] is None
    assert node["heads"] == ["conv_1", "conv_2"]
    assert node["status"] == "lost"
    assert told["conversations"] == {"conv_1": 2, "conv_2": 2}
