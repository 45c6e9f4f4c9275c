"""The prefix index: cached digests, sizes, pairs of calls and results, and problems equal those from scratch."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from for_each import for_each
from kedge._internal.json_text import encode_escaped
from kedge.errors import UnsupportedBlock
from kedge.planning import build_input_from_blocks, covered_count, find_problems, prefix_digest
from kedge.planning import digests as ledgers
from kedge.planning.digests import (
    FALLBACK_CALL_ID,
    get_prefix_index,
    is_compaction,
)
from kedge.turns import (
    Block,
    FrozenMap,
    ReasoningBlock,
    RefusalPart,
    TextPart,
    Turn,
    assistant,
    block_from_item,
    file,
    image,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from planning.recorded_turns import make_plan
from planning.reference_digests import naive_digests
from planning.simulation import Script, Simulation, scripts
from strategies import scale_examples

BLOCK_FACTORIES: tuple[Callable[[], Block], ...] = (
    lambda: user("hello"),
    lambda: user("another"),
    lambda: assistant("hi"),
    lambda: system("be brief"),
    lambda: reasoning("hm"),
    lambda: tool_call("f", "{}", call_id="c1"),
    lambda: tool_call("f", "{}", call_id="c2"),
    lambda: tool_result("c1", "1"),
    lambda: tool_result("c2", "2"),
    lambda: opaque({"type": "compaction", "encrypted_content": "x"}),
    lambda: opaque({"type": "web_search_call", "id": "ws"}),
    lambda: opaque({"type": "reasoning", "summary": "?"}),
)


def measure_encoded(block: Block) -> int:
    """Return the bytes of a block in the input of a request, with a comma, as the encoder writes it."""
    try:
        items = build_input_from_blocks([block], {block.id})
    except UnsupportedBlock:
        return 0
    return sum(len(encode_escaped(item)) + 1 for item in items)


def check_digests(turn: Turn) -> None:
    """Compare the cached values of a Turn's prefix index with values computed from scratch."""
    body, rebuilt = turn.body, get_prefix_index(Turn(turn.blocks))
    covered = [block for block in body if not isinstance(block, ReasoningBlock)]
    prefix_index, digests = get_prefix_index(turn), naive_digests(turn)
    assert covered_count(turn) == prefix_index.covered == len(covered)
    assert prefix_index.count(len(body)) == len(covered)
    assert [prefix_index.digest(count) for count in range(len(covered) + 1)] == digests
    assert [prefix_digest(turn, count) for count in range(len(covered) + 1)] == digests
    ends = [0, *(index + 1 for index, b in enumerate(body) if not isinstance(b, ReasoningBlock))]
    assert [prefix_index.end_position(count) for count in range(len(covered) + 1)] == ends
    total = sum(measure_encoded(block) for block in covered)
    assert prefix_index.byte_size(0, len(covered)) == total
    uncovered = [index for index, block in enumerate(body) if isinstance(block, ReasoningBlock)]
    assert prefix_index.uncovered_positions(0, len(body)) == uncovered
    positions = [index for index, block in enumerate(body) if is_compaction(block)]
    assert prefix_index.barriers == positions
    for first in (0, *positions):
        assert find_problems(turn, first) == find_problems(Turn(turn.blocks), first)
        alone = Turn(body[first:])
        if not alone.lead:
            assert find_problems(turn, first) == find_problems(alone)
    assert prefix_index.length == rebuilt.length == len(body)


@settings(max_examples=scale_examples(20), suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_caching_does_not_change_results(script: Script) -> None:
    """Cached digests are correct after any sequence of appends, edits, truncations and forks."""
    simulation = Simulation()
    simulation.run(script)
    family = [*simulation.history, *simulation.branches]
    for turn in random.Random(len(script)).sample(family, len(family)):
        check_digests(turn)


CITED = TextPart("Hi", extra=FrozenMap(annotations=[{"type": "url_citation", "n": 0.1}]))
SEARCH: dict[str, Any] = {"type": "web_search_call", "id": "ws", "status": "completed"}
SEARCH |= {"big": 1e16, "small": 1e-05, "none": None, "list": [None, True, 2**70]}
GOLDEN_BLOCKS: list[tuple[Block, str]] = [
    (user("Hello é"), "5792e141614dd7653550b0bf289d052d3af9a817c726267273d0a3f4026706ad"),
    (
        assistant([CITED, RefusalPart("no")]),
        "7b630a366784fe22019eb6095a4064de48e02494db9986ce232c9a988026e346",
    ),
    (
        tool_call("f", '{"a": 1e16}', call_id="c1"),
        "b25247257c5b767d0417bc9dc126bcf85c3bfd609d656a4fb9a601bc3ea540b2",
    ),
    (
        tool_result("c1", ["x", image("https://a.example/b.png")], custom=True),
        "b07a25890ffd1c7ed3fc5e5b9635d7cd0d3b0bcfe27ff9a69e4f80e9dd37a217",
    ),
    (reasoning("hidden"), "b07a25890ffd1c7ed3fc5e5b9635d7cd0d3b0bcfe27ff9a69e4f80e9dd37a217"),
    (opaque(SEARCH), "3e1d6e34cc3be15c2ae6b85b5555a3a6e7d45586871900a0ec2db9217263066e"),
    (
        system("later", "developer"),
        "ec9697bf9055e3764ddda887465457c9c2e49dcd99a9ff699441b7e37be8e7f8",
    ),
    (
        user(file("https://a.example/c.pdf", filename="c.pdf")),
        "1a6c4cd2ae76213a670628589f0b8422610855018e3720128eaf022192ba36da",
    ),
]


def test_digests_are_pinned() -> None:
    """The digest of every prefix of a Turn with all kinds of content never changes: stored anchors depend on it."""
    blocks = [block for block, _ in GOLDEN_BLOCKS]
    for length, (_, digest) in enumerate(GOLDEN_BLOCKS, 1):
        assert prefix_digest(Turn(blocks[:length])) == f"sha256:{digest}"


def test_appending_does_not_rehash_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a Turn that grew by one block hashes one block, and leaves the index of the old Turn unchanged."""
    blocks: list[Block] = []
    write = ledgers.measure_canonical
    monkeypatch.setattr(ledgers, "measure_canonical", lambda b: (blocks.append(b), write(b))[1])
    turn = Turn([user("a"), assistant("b"), user("c")])
    index = get_prefix_index(turn)
    assert len(blocks) == 3
    longer = turn.append(user("d"))
    assert get_prefix_index(longer).length == 4
    assert len(blocks) == 4
    edited = longer.edit(longer[1].id, assistant("x"))
    assert get_prefix_index(edited).digest(4) != get_prefix_index(longer).digest(4)
    assert len(blocks) == 5  # the digests after the edit are new, the hashes of the blocks are not
    assert get_prefix_index(turn) is index
    assert get_prefix_index(turn.with_data(a=1)) is index


def test_interrupted_extension_leaves_no_partial_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption while the prefix index is extended leaves no partially added block."""
    turn = Turn([user("a"), assistant("b")])
    get_prefix_index(turn)
    longer = turn.append(reasoning("hm"), tool_call("f", "{}", call_id="c1"), user("d"))
    write = ledgers.measure_canonical

    def interrupted(block: Block) -> tuple[bytes | None, int]:
        if block is longer[-1]:
            raise KeyboardInterrupt
        return write(block)

    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "measure_canonical", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get_prefix_index(longer)
    for each in (turn, longer, turn.append(user("e"))):
        check_digests(each)


@contextmanager
def switch_threads_often() -> Iterator[None]:
    """Make the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_can_plan_forks_of_one_turn() -> None:
    """Threads that extend forks of one Turn each get the digests and problems of their own fork."""
    with switch_threads_often(), ThreadPoolExecutor(4) as pool:
        for attempt in range(12):
            base = Turn([user("a"), *(make() for make in BLOCK_FACTORIES)])
            get_prefix_index(base)
            start = threading.Barrier(4)

            def grow(name: int, base: Turn = base, start: threading.Barrier = start) -> list[Turn]:
                turn, turns = base, [base]
                start.wait(300)
                for step in range(12):
                    turn = turn.append(BLOCK_FACTORIES[(name + step) % len(BLOCK_FACTORIES)]())
                    assert prefix_digest(turn) == naive_digests(turn)[-1]
                    assert find_problems(base) == find_problems(Turn(base.blocks))
                    turns.append(turn)
                return turns

            for turns in pool.map(grow, [attempt, attempt, 0, 5]):
                check_digests(turns[-1])
                check_digests(turns[3])


def make_call(call_id: str = "c", **more: Any) -> Block:
    """Return a tool call."""
    return tool_call("look", "{}", call_id=call_id, **more)


ASYNC_CALL = block_from_item(
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "async": True}
)
LOCAL_CALL = opaque({"type": "local_shell_call", "id": "i", "call_id": "c"})


def local_answer(call_id: str) -> Block:
    return opaque({"type": "local_shell_call_output", "id": call_id})


def problem_kinds(*blocks: Block) -> list[tuple[str, str]]:
    """Return the kind and call id of each problem of a Turn with these blocks."""
    return [(problem.kind, problem.call_id) for problem in find_problems(Turn(blocks))]


def answer() -> Block:
    return tool_result("c", "1")


@for_each(
    ("blocks", "expected"),
    [
        ([user("a")], []),
        ([make_call(), answer()], []),
        ([make_call("a"), make_call("b"), tool_result("b", "1"), tool_result("a", "2")], []),
        ([make_call()], [("unanswered", "c")]),
        ([answer()], [("orphan", "c")]),
        ([answer(), make_call()], [("orphan", "c"), ("unanswered", "c")]),
        ([make_call(), answer(), answer()], [("answered_twice", "c")]),
        ([make_call(), make_call(), answer()], [("called_twice", "c")]),
        ([make_call(), answer(), make_call(), answer()], []),
        ([make_call(custom=True), answer()], [("unanswered", "c"), ("orphan", "c")]),
        ([make_call(custom=True), tool_result("c", "1", custom=True)], []),
        # An asynchronous call can be answered later, and is still paired with its result.
        ([ASYNC_CALL], []),
        ([ASYNC_CALL, answer()], []),
        ([ASYNC_CALL, answer(), answer()], [("answered_twice", "c")]),
        ([opaque({"type": "shell_call", "call_id": "s", "async": True})], []),
        # A server decides whether to accept an item without an id.
        ([opaque({"type": "shell_call"}), opaque({"type": "shell_call", "call_id": 3})], []),
        # A local shell call can be answered by its id or its call_id, but only once.
        ([LOCAL_CALL, local_answer("i")], []),
        ([LOCAL_CALL, local_answer("c")], []),
        ([LOCAL_CALL, local_answer("i"), local_answer("c")], [("answered_twice", "c")]),
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


def test_problems_explain_what_to_do() -> None:
    """The message of each kind of problem says what to do, and names the tool if it is known."""
    twice = [tool_result("b", "1"), tool_result("b", "1")]
    blocks = [make_call("a"), make_call("b"), make_call("b"), *twice]
    reported = [str(problem) for problem in find_problems(Turn([*blocks, tool_result("z", "1")]))]
    assert reported == [
        "call a (look) has no result; add one or remove the call",
        "call b (look) is repeated before its result; use a new call_id",
        "call b has a second result; remove one of them",
        "the result for z has no call before it; remove it or restore the call",
    ]
    assert next(problem.block_id for problem in find_problems(Turn(blocks))) == blocks[0].id


@for_each(
    ("blocks", "expected"),
    [
        ([make_call(), answer()], {"id": 1}),
        ([make_call(metadata={FALLBACK_CALL_ID: True}), answer()], {"fallback": 1}),
        ([make_call(), answer(), answer()], {"id": 1, "unmatched": 1}),
        ([answer()], {"unmatched": 1}),
        ([LOCAL_CALL, local_answer("i")], {"fallback": 1}),
        ([make_call(), answer(), user("a", origin="engine")], {}),
    ],
)
def test_results_are_counted_by_their_match(blocks: list[Block], expected: dict[str, int]) -> None:
    """Results since the newest answer match their call by its id, by another id, or not at all."""
    assert make_plan(Turn(blocks)).count_results() == expected


def test_results_of_a_longer_turn_are_not_counted() -> None:
    """A Turn shares its index with its continuations, and counts only its results."""
    turn = Turn([make_call(), answer()])
    longer = turn.append(make_call("d"), tool_result("d", "2"))
    assert make_plan(longer).count_results() == {"id": 2}
    assert make_plan(turn).count_results() == {"id": 1}
