"""What proof costs: planning a request, against writing and hashing the same blocks.

Baseline, in the same run: sha256 over the canonical JSON of all blocks, written by ``json.dumps`` in one
call. A cold plan derives every digest; a warm plan follows a Turn that grew by one block, and is measured together
with appending that block.
"""

import gc
import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence

from benchmarks.table import Row
from kedge.planning import RequestPlan, canonical, plan_request, record_response
from kedge.turns import Block, Turn, assistant, system, tool_call, tool_result, user

BASELINE = "sha256 over canonical JSON"
SCOPE = "bench"


def make_blocks(count: int) -> list[Block]:
    """A conversation with tools, of ``count`` blocks after the system text."""
    blocks: list[Block] = [system("You are a patient weather service. Answer in one sentence.")]
    for i in range((count + 3) // 4):
        call_id = f"call_{i:08d}"
        blocks += [
            user(
                f"Question {i}: what is the weather in city number {i}, and do I need a coat? " * 3
            ),
            tool_call("get_weather", {"city": f"city {i}", "unit": "C"}, call_id=call_id),
            tool_result(call_id, {"temperature": i, "sky": "cloudy", "note": "windy " * 10}),
            assistant(f"It is {i} degrees and cloudy in city {i}; take a coat. " * 6),
        ]
    return blocks[: count + 1]


def run() -> list[Row]:
    """Measure cold and warm plans at three sizes, and the memory that the digests take."""
    rows: list[Row] = []
    for count, limit in ((100, 80), (1_000, 250), (10_000, 5_000)):
        blocks = make_blocks(count)
        base, cold = _compare_cold(blocks, number=max(1, 2_000 // count))
        warm = _measure_warm(blocks)
        rows += [
            Row(f"cold plan, {count:,} blocks", cold / base, 0.4, detail=f"{cold * 1e3:.2f} ms"),
            Row(f"append a block and plan, {count:,} blocks", warm * 1e6, limit, "µs"),
        ]
    rows.append(
        Row(
            "memory that a plan caches a block, 10,000 blocks",
            _measure_memory(make_blocks(10_000)),
            200,
            "B",
        )
    )
    return rows


def _hash_blocks(blocks: list[Block]) -> bytes:
    forms = [canonical(block) for block in blocks]
    encoded = json.dumps(forms, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(encoded.encode()).digest()


def _compare_cold(blocks: list[Block], number: int) -> list[float]:
    """CPU seconds of the baseline, and of a plan that finds no digest in the Turn or in its blocks."""
    best = [float("inf")] * 2
    for _ in range(5):
        turns = [Turn(make_blocks(len(blocks) - 1)) for _ in range(number)]
        spent = (
            _measure(lambda: [_hash_blocks(blocks) for _ in range(number)]),
            _measure(lambda turns=turns: [_plan(turn) for turn in turns]),
        )
        best = [min(pair) for pair in zip(best, spent, strict=True)]
    return [seconds / number for seconds in best]


def _measure_warm(blocks: list[Block]) -> float:
    turn = Turn(blocks)
    turn = record_response(
        turn, [assistant("Yes.")], response_id="resp_0", plan=_plan(turn), created_at=0.0
    )

    def grow(added: Sequence[Block]) -> None:
        nonlocal turn
        for block in added:
            turn = turn.append(block)
            _plan(turn)

    # Several at once: garbage collection before each would mostly measure filling the processor's caches.
    rounds = [[user(f"And tomorrow, {i}?") for i in range(100)] for _ in range(10)]
    return min(_measure(lambda added=added: grow(added)) / len(added) for added in rounds)


def _measure_memory(blocks: list[Block]) -> float:
    turn = Turn(blocks)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    plan = plan_request(turn, scope=SCOPE, now=0.0)
    del plan
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(blocks)


def _plan(turn: Turn) -> RequestPlan:
    return plan_request(turn, scope=SCOPE, now=1.0)


def _measure(work: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time_ns()
        work()
        return (time.process_time_ns() - start) / 1e9
    finally:
        gc.enable()
