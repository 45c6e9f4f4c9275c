"""Pairing tool calls with results, and the problems that prevent sending."""

from typing import Any

from for_each import for_each
from kedge.planning import find_problems
from kedge.planning.digests import FALLBACK_CALL_ID, call_effect
from kedge.turns import Block, Turn, block_from_item, opaque, tool_call, tool_result, user
from planning.recorded_turns import make_plan


def make_call(call_id: str = "c", **more: Any) -> Block:
    """Return a tool call."""
    return tool_call("look", "{}", call_id=call_id, **more)


def problem_kinds(*blocks: Block) -> list[tuple[str, str]]:
    """Return the kind and call id of each problem of a Turn with these blocks."""
    return [(problem.kind, problem.call_id) for problem in find_problems(Turn(blocks))]


@for_each(
    ("blocks", "expected"),
    [
        ([user("a")], []),
        ([make_call(), tool_result("c", "1")], []),
        ([make_call("a"), make_call("b"), tool_result("b", "1"), tool_result("a", "2")], []),
        ([make_call()], [("unanswered", "c")]),
        ([tool_result("c", "1")], [("orphan", "c")]),
        ([tool_result("c", "1"), make_call()], [("orphan", "c"), ("unanswered", "c")]),
        (
            [make_call(), tool_result("c", "1"), tool_result("c", "2")],
            [("answered_twice", "c")],
        ),
        ([make_call(), make_call(), tool_result("c", "1")], [("called_twice", "c")]),
        ([make_call(), tool_result("c", "1"), make_call(), tool_result("c", "2")], []),
        (
            [make_call(), tool_result("c", "1", custom=True)],
            [("unanswered", "c"), ("orphan", "c")],
        ),
        ([make_call(custom=True), tool_result("c", "1", custom=True)], []),
    ],
)
def test_calls_and_results_are_paired(blocks: list[Block], expected: list[tuple[str, str]]) -> None:
    """Calls and results are paired by call id and kind, each call once, in the order of the blocks."""
    assert problem_kinds(*blocks) == expected


OPAQUE = [
    ("computer_call", "call_id", "computer_call_output", "call_id"),
    ("shell_call", "call_id", "shell_call_output", "call_id"),
    ("apply_patch_call", "call_id", "apply_patch_call_output", "call_id"),
    ("local_shell_call", "id", "local_shell_call_output", "id"),
    ("local_shell_call", "call_id", "local_shell_call_output", "id"),
    ("mcp_approval_request", "id", "mcp_approval_response", "approval_request_id"),
]


@for_each(("calls", "key", "answers", "join"), OPAQUE)
def test_opaque_calls_are_paired(calls: str, key: str, answers: str, join: str) -> None:
    """An opaque item that a client must answer is paired with its answer by the id they share."""
    call = opaque({"type": calls, key: "k"})
    answer = opaque({"type": answers, join: "k"})
    assert problem_kinds(call) == [("unanswered", "k")]
    assert problem_kinds(call, answer) == []
    assert problem_kinds(answer) == [("orphan", "k")]


def test_local_shell_call_accepts_either_of_its_ids() -> None:
    """A local shell call can be answered by its id or its call_id, but only once."""
    call = opaque({"type": "local_shell_call", "id": "i", "call_id": "c"})
    for key in ("i", "c"):
        assert problem_kinds(call, opaque({"type": "local_shell_call_output", "id": key})) == []
    both = [opaque({"type": "local_shell_call_output", "id": key}) for key in ("i", "c")]
    assert problem_kinds(call, *both) == [("answered_twice", "c")]


def test_async_call_needs_no_result() -> None:
    """An asynchronous call can be answered later, and is still paired with its result."""
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "async": True}
    waiting = block_from_item(item)
    assert problem_kinds(waiting) == []
    assert problem_kinds(waiting, tool_result("c", "1")) == []
    assert problem_kinds(waiting, tool_result("c", "1"), tool_result("c", "2")) == [
        ("answered_twice", "c")
    ]
    assert problem_kinds(opaque({"type": "shell_call", "call_id": "s", "async": True})) == []


def test_item_without_an_id_is_not_paired() -> None:
    """An item without an id is not paired, and the server decides whether to accept it."""
    assert call_effect(opaque({"type": "shell_call"})) is None
    assert call_effect(opaque({"type": "shell_call", "call_id": 3})) is None
    assert call_effect(user("a")) is None


def test_problems_explain_what_to_do() -> None:
    """The message of each kind of problem says what to do, and names the tool if it is known."""
    blocks = [
        make_call("a"),
        make_call("b"),
        make_call("b"),
        tool_result("b", "1"),
        tool_result("b", "1"),
    ]
    reported = [str(problem) for problem in find_problems(Turn([*blocks, tool_result("z", "1")]))]
    assert reported == [
        "call a (look) has no result; add one or remove the call",
        "call b (look) is repeated before its result; use a new call_id",
        "call b has a second result; remove one of them",
        "the result for z has no call before it; remove it or restore the call",
    ]
    assert next(problem.block_id for problem in find_problems(Turn(blocks))) == blocks[0].id


def test_many_open_calls() -> None:
    """Thousands of calls followed by all their results are paired in linear time."""
    names = [f"c{number}" for number in range(3_000)]
    blocks = [*map(make_call, names), *(tool_result(name, "1") for name in names)]
    assert problem_kinds(*blocks) == []


@for_each(
    ("blocks", "expected"),
    [
        ([make_call(), tool_result("c", "1")], {"id": 1}),
        ([make_call(metadata={FALLBACK_CALL_ID: True}), tool_result("c", "1")], {"fallback": 1}),
        ([make_call(), tool_result("c", "1"), tool_result("c", "2")], {"id": 1, "unmatched": 1}),
        ([tool_result("c", "1")], {"unmatched": 1}),
        (
            [
                opaque({"type": "local_shell_call", "call_id": "a", "id": "lsh_1"}),
                opaque({"type": "local_shell_call_output", "id": "lsh_1"}),
            ],
            {"fallback": 1},
        ),
        ([make_call(), tool_result("c", "1"), user("a", origin="engine")], {}),
        ([user("a")], {}),
    ],
)
def test_results_are_counted_by_their_match(blocks: list[Block], expected: dict[str, int]) -> None:
    """Results since the newest answer match their call by its id, by another id, or not at all."""
    assert make_plan(Turn(blocks)).count_results() == expected


def test_results_of_a_longer_turn_are_not_counted() -> None:
    """A Turn shares its index with its continuations, and counts only its results."""
    turn = Turn([make_call(), tool_result("c", "1")])
    longer = turn.append(make_call("d"), tool_result("d", "2"))
    assert make_plan(longer).count_results() == {"id": 2}
    assert make_plan(turn).count_results() == {"id": 1}
