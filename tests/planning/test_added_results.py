"""Results that a change of a Turn adds: which are rejected, and the id that the error names."""

from typing import Any

import pytest

from for_each import for_each
from kedge.errors import UnmatchedResult
from kedge.planning import check_added_results
from kedge.turns import Block, Source, Turn, block_from_item, tool_call, tool_result, user

ADD = tool_call("add", "{}", call_id="call_1", id="blk_add", source=Source("resp_1", "fc_1", 0))
SUB = tool_call("sub", "{}", call_id="call_2", id="blk_sub", source=Source("resp_1", "fc_2", 1))
RUN = tool_call("run", "ls", call_id="call_3", custom=True)
SUM = tool_result("call_1", "5", id="blk_sum")
SHELL = block_from_item(
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_4", "action": {}}
)
APPROVAL = block_from_item(
    {"type": "mcp_approval_request", "id": "mcpr_1", "name": "x", "arguments": "{}"}
)


def approve(request_id: str) -> Block:
    """Return an approval of a call of an MCP server."""
    item = {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True}
    return block_from_item(item)


REJECTED: list[tuple[list[Block], list[Block], str, str]] = [
    (
        [ADD],
        [tool_result("fc_1", "5")],
        "fc_1 is the id of the item of call call_1 (add)",
        "call_1",
    ),
    ([ADD], [tool_result("blk_add", "5")], "blk_add is the id of the block", "call_1"),
    ([ADD, SUM], [tool_result("fc_1", "5")], "call_1 (add), which has a result already", "call_1"),
    ([ADD, SUM], [tool_result("call_1", "6")], "call_1 has a result already", ""),
    ([ADD], [SUM, tool_result("call_1", "6")], "call_1 has a result already", ""),
    ([ADD, SUB], [tool_result("call_9", "5")], "open calls: call_1 (add), call_2 (sub)", ""),
    ([ADD, SUM], [tool_result("call_9", "5")], "call_id call_9 here; no call is open", ""),
    ([SUM], [tool_result("call_1", "6")], "call_id call_1 here; no call is open", ""),
    ([], [tool_result("call_1", "5"), ADD], "is before its call; move it after", "call_1"),
    ([RUN], [tool_result("call_3", "5")], "use tool_result(…, custom=True)", "call_3"),
    ([SHELL], [tool_result("call_4", "5")], "pass the result of a local_shell_call", "call_4"),
    ([APPROVAL], [approve("mcpr_2")], "no call has the call_id mcpr_2 here; open calls", ""),
    ([APPROVAL, approve("mcpr_1")], [approve("mcpr_1")], "mcpr_1 has a result already", ""),
    (
        [tool_call("f", "{}", call_id=f"c{number}") for number in range(7)],
        [tool_result("c9", "5")],
        "open calls: c0 (f), c1 (f), c2 (f), c3 (f), c4 (f), …",
        "",
    ),
]


@for_each(("known", "added", "message", "expected"), REJECTED)
def test_a_new_result_without_an_open_call_is_rejected(
    known: list[Block], added: list[Block], message: str, expected: str
) -> None:
    """The error has the right id if the Turn shows it, and the open calls otherwise."""
    before = Turn([user("Hello"), *known])
    with pytest.raises(UnmatchedResult) as raised:
        check_added_results(before, before.append(*added))
    assert message in str(raised.value)
    assert raised.value.expected == expected


ORPHAN = tool_result("call_0", "5", id="blk_orphan")
ACCEPTED: list[tuple[list[Block], list[Block]]] = [
    ([ADD], [ADD, SUM]),
    ([ADD, SUB], [ADD, SUB, tool_result("call_2", "1"), SUM]),
    ([], [ADD, SUM]),
    ([SHELL], [SHELL, block_from_item({"type": "local_shell_call_output", "id": "call_4"})]),
    ([APPROVAL], [APPROVAL, approve("mcpr_1")]),
    ([ORPHAN], [ORPHAN, user("And now?")]),
    ([ORPHAN, ADD], [ORPHAN, ADD, SUM]),
    ([ORPHAN], [tool_result("call_0", "7", id="blk_orphan")]),
    ([ADD, SUM], [SUM]),
    ([ORPHAN, ADD, SUM], [tool_result("call_0", "5"), ADD, tool_result("call_1", "5")]),
    ([ADD], [ADD, user("Never mind.")]),
]


@for_each(("known", "changed"), ACCEPTED)
def test_other_changes_are_accepted(known: list[Block], changed: list[Block]) -> None:
    """A result of an open call is accepted, and so is what ``repair`` corrects in a stored history."""
    before = Turn([user("Hello"), *known])
    check_added_results(before, before.with_blocks([before[0], *changed]))


def test_a_result_before_another_one_is_rejected() -> None:
    """A second result is rejected, also if it is inserted before the first one or replaces another block."""
    before = Turn([user("Hello"), ADD, user("Go on."), SUM])
    changes: list[Any] = [
        before.insert(2, tool_result("call_1", "6")),
        before.edit(before[2], tool_result("call_1", "6")),
    ]
    for after in changes:
        with pytest.raises(UnmatchedResult, match="call_1 has a result already"):
            check_added_results(before, after)
