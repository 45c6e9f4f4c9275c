"""What state bytes cost: against bare ``json`` of the same data, and against the text they hold.

Baseline of encoding: ``json.dumps`` of the parsed state; of decoding: ``json.loads`` of the bytes, in the
same run. Sizes are given against the JSON-escaped text, with ids as long as those of a real provider. Memory is what
Python allocates: for each block of a conversation beyond its text, and for each open conversation.
"""

import asyncio
import gc
import json
import tempfile
import time
import tracemalloc
from typing import Any

from benchmarks.table import Row, compare_cpu, cpu_seconds
from kedge.compaction import BlockCounter
from kedge.conversation.chat_state import ChatState, decode_state, encode_state, state_from_turn
from kedge.planning import plan_request, prefix_digest, record_response
from kedge.turns import Block, Source, Turn, assistant, dump_block, tool_call, tool_result, user
from kedge.usage.tokens import TiktokenCounter

BASELINE = "json of the same data"
SCOPE = "openai/api.openai.com/v1/0123456789abcdef"
BLOCKS = 1_000


def make_conversation(blocks: int) -> Turn:
    """A conversation with tools: four blocks and two responses for each question."""
    turn = Turn()
    for i in range(blocks // 4):
        question = (
            f"Question {i}: what is the weather in city number {i}, and do I need a coat? " * 3
        )
        called = tool_call("get_weather", {"city": f"city {i}"}, call_id=f"call_{i:024d}")
        turn = _add_response(turn.append(user(question)), called, f"fc_{i:050d}", 2 * i)
        result = {"temperature": i, "sky": "cloudy", "note": "windy " * 10}
        turn = turn.append(tool_result(f"call_{i:024d}", result))
        answer = assistant(f"It is {i} degrees and cloudy in city {i}; take a coat. " * 6)
        turn = _add_response(turn, answer, f"msg_{i:050d}", 2 * i + 1)
    return turn


def _add_response(turn: Turn, block: Block, item_id: str, number: int) -> Turn:
    return record_response(
        turn,
        [block.with_source(Source(item_id=item_id))],
        response_id=f"resp_{number:048d}",
        plan=plan_request(turn, scope=SCOPE, now=float(number)),
        created_at=1_763_200_000.1234567 + number,
    )


def run() -> list[Row]:
    """Measure encoding, decoding, size and counting."""
    turn = make_conversation(BLOCKS)
    state = state_from_turn(turn, "openai", len(turn))
    data = encode_state(state)
    assert decode_state(data, "openai") == state
    return [
        *_measure_speed(state, data),
        *_measure_size(turn, data),
        *_measure_counting(turn),
        *_measure_memory(turn, data),
    ]


def _measure_speed(state: ChatState, data: bytes) -> list[Row]:
    parsed = json.loads(data)
    dumps, encode = compare_cpu(lambda: json.dumps(parsed), lambda: encode_state(state), number=5)
    loads, decode = compare_cpu(
        lambda: json.loads(data), lambda: decode_state(data, "openai"), number=5
    )
    return [
        Row(f"encode {BLOCKS:,} blocks", encode / dumps, 2.0, detail=_format_ms(encode)),
        Row(f"decode {BLOCKS:,} blocks", decode / loads, 3.5, detail=_format_ms(decode)),
    ]


def _measure_size(turn: Turn, data: bytes) -> list[Row]:
    responses = len(turn) // 2
    over = len(data) - sum(map(_escaped_size, turn.blocks))
    allowed = 200 * len(turn) + 320 * responses
    detail = f"{len(data):,} bytes, {over / len(turn):.0f} a block beyond its text"
    return [Row("bytes beyond the text", over / allowed, 1.0, "x", detail, "the allowed size")]


def _escaped_size(block: Block) -> int:
    form: dict[str, Any] = dump_block(block)
    texts = [form.get("arguments", ""), *(part["text"] for part in form.get("parts", []))]
    return sum(len(json.dumps(text, ensure_ascii=False).encode()) - 2 for text in texts)


def _measure_memory(turn: Turn, data: bytes) -> list[Row]:
    """Decode the state and plan with it; open many conversations of one exchange and plan with them."""
    text = sum(map(_escaped_size, turn.blocks))
    gc.collect()
    tracemalloc.start()
    state = decode_state(data, "openai")
    assert isinstance(state, ChatState)
    grown = state.turn(following=(user("And tomorrow?"),))
    plan_request(grown, scope=SCOPE, now=0.0)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    opened = asyncio.run(_open_conversations(turn.blocks[:4]))
    tracemalloc.stop()
    return [
        Row("memory a block, with digests and anchors", (size - text) / len(turn), 2_000, "B"),
        Row("memory an open conversation of 4 blocks", opened / 1e3, 50, "kB"),
    ]


async def _open_conversations(blocks: tuple[Block, ...]) -> float:
    """Bytes of a further open conversation, of many that share a store and an engine."""
    from kedge.conversation import Conversation
    from kedge.providers import connect
    from kedge.store import open_store

    engine = connect("practice")
    with tempfile.TemporaryDirectory() as folder:
        async with engine, open_store(f"sqlite:///{folder}/memory.sqlite3") as store:
            conversation = await Conversation.create(engine, store=store, blocks=blocks)
            opened: list[Conversation] = []
            before = 0
            for number in range(101):
                opened.append(await Conversation.open(engine, store=store, id=conversation.id))
                opened[-1].plan("And tomorrow?")
                if number == 0:  # what is loaded once
                    gc.collect()
                    before, _ = tracemalloc.get_traced_memory()
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) / 100


def _measure_counting(turn: Turn) -> list[Row]:
    """Count a conversation, let it grow by two blocks, and count it again."""
    BlockCounter(TiktokenCounter()).count_blocks(turn.blocks[:1])  # the vocabulary is read once
    prefix_digest(turn)
    cold = cpu_seconds(lambda: BlockCounter(TiktokenCounter()).count_blocks(turn.blocks), repeat=3)
    counter = BlockCounter(TiktokenCounter())
    counter.count_blocks(turn.blocks)
    grown = float("inf")
    alone = float("inf")
    for number in range(20):
        text = f"And what about tomorrow, in city number {number}? I would like to know. " * 3
        turn = turn.append(user(text), assistant(text.upper()))
        prefix_digest(turn)
        block_counter = BlockCounter(TiktokenCounter())
        alone = min(alone, _measure(lambda f=block_counter, t=turn: f.count_blocks(t.blocks[-2:])))
        grown = min(grown, _measure(lambda t=turn: counter.count_blocks(t.blocks)))
    return [
        Row("count 2 more blocks", grown / cold, 0.02, "x", _format_ms(grown), "counting all"),
        Row("count 2 more blocks", grown / alone, None, "x", _format_ms(alone), "counting those 2"),
    ]


def _measure(work: Any) -> float:
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1e9


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
