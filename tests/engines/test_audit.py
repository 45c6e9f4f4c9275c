"""Test the audit, which compares a server's stored context with the Turn."""

from typing import Any

import pytest
from msgspec import structs

from engines.runs import Link, send_lines
from kedge.engines import ResponsesEngine
from kedge.planning import get_state, prefix_digest, set_state
from kedge.testing import TestServer
from kedge.turns import Turn, user


async def test_every_block_that_the_anchor_covers_is_compared(engine: ResponsesEngine) -> None:
    """An honest server agrees over the complete chain; a false anchor record is a difference."""
    turn = await send_lines(engine, "One", "Think about two.", "Three")
    audit = await engine.verify(turn)
    assert (audit.agrees, audit.checked) == (True, 6)
    assert "same 6 blocks" in str(audit)
    audit = await engine.verify(forge_records(turn))
    assert audit.agrees is False
    assert "block 1" in audit.difference


async def test_without_an_anchor_there_is_nothing_to_verify(engine: ResponsesEngine) -> None:
    """A Turn that would be sent in full has no stored context to check."""
    audit = await engine.verify(Turn([user("Hi")]))
    assert audit.agrees is None


def forge_records(turn: Turn, index: int = 0) -> Turn:
    """Return the Turn with an edit and anchor records that claim that the server stored the edit."""
    edited = turn.edit(turn.blocks[index].id, user("Something else"))
    state = get_state(turn)
    records = [
        structs.replace(record, digest=prefix_digest(edited, record.block_count))
        for record in state.anchors
    ]
    return set_state(edited, structs.replace(state, anchors=tuple(records)))


async def test_audit_without_stored_items_has_no_result(link: Link) -> None:
    """Items that cannot be fetched are not compared, so the audit has no result."""
    turn = await link.send("One")
    link.server.forget()
    audit = await link.engine.verify(turn)
    assert audit.agrees is None


async def test_a_response_that_is_not_listed_any_more_is_a_difference(link: Link) -> None:
    """A server that has listed what it stores, and then does not, has lost it."""
    turn = await link.send("One")
    assert (await link.engine.verify(turn)).agrees is True
    link.server.forget()
    audit = await link.engine.verify(turn)
    assert audit.agrees is False
    assert "no longer has" in audit.difference


async def test_blocks_before_a_compaction_are_not_compared(engine: ResponsesEngine) -> None:
    """The server's context starts with its own summary, while the Turn still has the summarized blocks."""
    compacting: Any = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    turn = await send_lines(engine, *("Tell me more about rivers. " * 60,) * 4, **compacting)
    turn = await send_lines(engine, "What did I say first?", turn=turn)
    plan = engine.plan(turn)
    assert plan.anchor is not None
    assert plan.barrier
    audit = await engine.verify(turn)
    assert audit.agrees is True
    assert audit.checked == plan.anchor.block_count - plan.barrier


async def test_explicit_compaction_is_compared(engine: ResponsesEngine) -> None:
    """The blocks of an explicit compaction were sent to the server, so they are compared."""
    compacted, _ = await engine.compact(await send_lines(engine, "One", "Two"))
    turn = await send_lines(engine, "Three", "Four", turn=Turn(compacted))
    audit = await engine.verify(turn)
    assert audit.agrees is True
    forgery = await engine.verify(forge_records(turn, index=len(compacted)))
    assert forgery.agrees is False


@pytest.mark.parametrize(
    "response_id", ["../../admin", "..", "x/../../admin", "a?b", "@evil/x", "é"]
)
async def test_an_id_does_not_choose_another_address(
    response_id: str, server: TestServer, engine: ResponsesEngine
) -> None:
    """An id in an imported Turn is one segment of a URL, or the audit has no result."""
    turn = await send_lines(engine, "One")
    state = get_state(turn)
    records = tuple(structs.replace(record, response_id=response_id) for record in state.anchors)
    turn = set_state(
        turn, structs.replace(state, anchors=records, previous_response_id=response_id)
    )
    server.requests.clear()
    audit = await engine.verify(turn)
    assert not audit.agrees
    expected = f"/v1/responses/{response_id}"
    assert {each.path for each in server.requests} <= {expected, f"{expected}/input_items"}
    assert not any(".." in each.path.split("/") for each in server.requests)
