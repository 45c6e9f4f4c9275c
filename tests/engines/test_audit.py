"""The audit compares what a server really holds with the Turn."""

from dataclasses import replace
from typing import Any

from engines.conftest import open_engine
from engines.runs import request_bodies, send_lines
from kedge.engines import ResponsesEngine
from kedge.planning import get_state, prefix_digest, set_state
from kedge.testing import TestServer
from kedge.turns import Turn, user


async def test_an_honest_server_agrees(engine: ResponsesEngine) -> None:
    """Every block that the anchor covers is compared, over the whole chain."""
    turn = await send_lines(engine, "One", "Think about two.", "Three")
    found = await engine.verify(turn)
    assert found.agrees is True
    assert found.checked == 6
    assert "same 6 blocks" in str(found)


async def test_without_an_anchor_there_is_nothing_to_verify(engine: ResponsesEngine) -> None:
    """A Turn that would be sent whole has no memory to check."""
    found = await engine.verify(Turn([user("Hi")]))
    assert found.agrees is None


def forge_records(turn: Turn, index: int = 0) -> Turn:
    """The Turn with an edit, and a record that claims that the server knows of it."""
    edited = turn.replace(turn.blocks[index].id, user("Something else"))
    state = get_state(turn)
    records = [
        replace(record, digest=prefix_digest(edited, record.block_count))
        for record in state.anchors
    ]
    return set_state(edited, replace(state, anchors=tuple(records)))


async def test_a_difference_is_found_and_named(engine: ResponsesEngine) -> None:
    """A record that lies is caught by what the server holds."""
    turn = forge_records(await send_lines(engine, "One", "Two"))
    found = await engine.verify(turn)
    assert found.agrees is False
    assert "block 1" in found.difference


async def test_audits_now_and_then_heal_what_they_find(server: TestServer) -> None:
    """With verify_every=1 a lying record costs a full send, never a wrong answer."""
    async with open_engine(server, verify_every=1) as engine:
        turn = forge_records(await send_lines(engine, "One"))
        await engine.run(turn.append(user("What did I say first?")))
    assert "previous_response_id" not in request_bodies(server)[-1]


async def test_a_server_that_does_not_list_is_no_verdict(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """What cannot be fetched cannot be compared."""
    turn = await send_lines(engine, "One")
    server.forget()
    found = await engine.verify(turn)
    assert found.agrees is None


async def test_what_lies_before_a_compaction_is_not_compared(engine: ResponsesEngine) -> None:
    """The server's memory begins with its own summary; the Turn still holds what it stands for."""
    compacting: Any = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    turn = await send_lines(engine, *("Tell me more about rivers. " * 60,) * 4, **compacting)
    turn = await send_lines(engine, "What did I say first?", turn=turn)
    plan = engine.plan(turn)
    assert plan.anchor is not None
    assert plan.barrier
    found = await engine.verify(turn)
    assert found.agrees is True
    assert found.checked == plan.anchor.block_count - plan.barrier


async def test_a_compaction_put_there_on_purpose_is_compared(engine: ResponsesEngine) -> None:
    """What a server compacted when asked, and was then sent, is what it holds."""
    made, _ = await engine.compact(await send_lines(engine, "One", "Two"))
    turn = await send_lines(engine, "Three", "Four", turn=Turn(made))
    found = await engine.verify(turn)
    assert found.agrees is True
    forgery = await engine.verify(forge_records(turn, index=len(made)))
    assert forgery.agrees is False
