"""Test system text for one run: every engine sends it, and no Turn, digest or later request has it."""

from collections.abc import Callable
from typing import Any

import pytest

from engines.contract.conftest import open_engine
from kedge.engines import Engine
from kedge.engines.base import Middleware
from kedge.errors import Blocked, UnsupportedParameter
from kedge.middleware import block, guard, redact, with_middleware
from kedge.testing import TestServer
from kedge.turns import Turn, system, user

NOTE = "Reminder: the shop closes at five."


def body(server: TestServer) -> str:
    return str(server.requests[-1].body)


async def test_ephemeral_text_is_sent_once_and_not_stored(
    engine: Engine, server: TestServer
) -> None:
    """The ephemeral text is part of one request, and not of the Turn or the next request."""
    turn = await engine.run(
        Turn([system("Be brief."), user("Hello")]), ephemeral=[NOTE, system("And be kind.")]
    )
    assert NOTE in body(server)
    assert "And be kind." in body(server)
    assert NOTE not in str(turn.blocks)
    await engine.run(turn.append(user("And now?")))
    assert NOTE not in body(server)


async def test_later_deltas_do_not_grow(server: TestServer) -> None:
    """The response is an anchor: with ephemeral text in every request, only new blocks are sent."""
    async with open_engine(server, "responses") as engine:
        turn = Turn([system("Be brief.")])
        for number in range(4):
            turn = turn.append(user(f"Message {number}"))
            plan = engine.plan(turn, ephemeral=NOTE)
            assert plan.delta_blocks == 1
            assert (plan.anchor is not None) == (number > 0)
            turn = await engine.run(turn, ephemeral=NOTE)
            request: Any = server.requests[-1].body
            assert len(request["input"]) == 1
            assert request["instructions"] == f"Be brief.\n\n{NOTE}"


@pytest.mark.parametrize("wrap", [with_middleware, lambda engine, middleware: middleware(engine)])
async def test_guards_apply_to_ephemeral_text_and_its_plan(
    server: TestServer, wrap: Callable[[Engine, Middleware], Engine]
) -> None:
    """A dry run shows ephemeral text as it is sent, redacted, and is blocked as the request is."""
    async with open_engine(server, "responses") as engine:
        guarded = wrap(engine, guard(redact("five"), redact("shop")))
        turn = Turn([system("Be brief."), user("Hello")])
        plan = guarded.plan(turn, ephemeral=[NOTE, system("At five.")])
        await guarded.run(turn, ephemeral=[NOTE, system("At five.")])
        request: Any = server.requests[-1].body
        assert plan.instructions == request["instructions"]
        assert "five" not in body(server)
        assert plan.sizes[0] == len(server.requests[-1].raw)
        strict = wrap(engine, guard(block("five")))
        with pytest.raises(Blocked):
            strict.plan(turn, ephemeral=NOTE)
        with pytest.raises(Blocked):
            await strict.run(turn, ephemeral=NOTE)


async def test_only_system_text_can_be_ephemeral(server: TestServer) -> None:
    """Other blocks are rejected, because the server would store them as part of the context; so are other values."""
    async with open_engine(server, "responses") as engine:
        wrong: list[Any] = [[user("Hi")], user("Hi"), None]
        for each in wrong:
            with pytest.raises(UnsupportedParameter, match="append other blocks to the Turn"):
                await engine.run(Turn([user("Hello")]), ephemeral=each)
