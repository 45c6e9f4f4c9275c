"""Test the law on servers that forget, truncate chains, reuse ids or miscount tokens."""

from collections.abc import Mapping
from typing import Any

import pytest

from engines.fake_server import connect_to, serve_handler
from engines.memory_server import ORDINARY, EvidenceStore, FakeClock, MemoryServer
from engines.runs import list_reasons, talk
from for_each import for_each
from kedge.engines import Engine
from kedge.errors import InvalidSetting, ServerFailed
from kedge.events import Event, TextDelta
from kedge.events.run import Healed, ModeChanged, RequestPlanned, ServerForgot
from kedge.evidence.server_evidence import BASE_COOLDOWN, KnownServer
from kedge.middleware import tools, with_middleware
from kedge.planning import get_state
from kedge.providers import connect
from kedge.tools import tool
from kedge.turns import AssistantBlock, Turn, system, user
from normalization import expected_context, normalize_items

STREAMING = pytest.mark.parametrize("streaming", [True, False])


def is_coherent(server: MemoryServer, turn: Turn) -> bool:
    """Return whether the model's context equals the Turn before its answer."""
    return normalize_items(server.contexts[-1]) == expected_context(turn)


def count_healed(events: list[Event]) -> int:
    """Return how often a request was healed."""
    return sum(isinstance(event, Healed) for event in events)


def is_chained(body: dict[str, Any]) -> bool:
    """Return whether a request used the server's stored context."""
    return "previous_response_id" in body


async def send_messages(
    server: MemoryServer, engine: Engine, count: int, *, streaming: bool = True
) -> tuple[Turn, int]:
    """Send ordinary messages; return the Turn and the number of wrong answers that were shown."""
    turn, wrong = Turn(), 0
    for number in range(count):
        turn, _ = await talk(engine, turn, ORDINARY.format(number), streaming=streaming)
        wrong += not is_coherent(server, turn)
    return turn, wrong


@STREAMING
@pytest.mark.parametrize("usage", ["honest", "llama"])
@pytest.mark.parametrize("hidden_prompt", [0, 900])
async def test_unknown_server_is_chained_after_a_few_requests(
    streaming: bool, usage: str, hidden_prompt: int
) -> None:
    """Chaining starts with any tokenizer and any hidden prompt, and nothing is sent twice."""
    server = MemoryServer(usage=usage, hidden_prompt=hidden_prompt)
    async with connect_to(server.handle) as engine:
        turn, wrong = await send_messages(server, engine, 12, streaming=streaming)
        assert (wrong, len(server.bodies)) == (0, 12)
        assert all(map(is_chained, server.bodies[5:]))
        plan = engine.plan(turn.append(user("And?")), streaming=streaming)
        assert plan.anchor is not None


async def test_answer_of_an_unproven_server_is_held_back() -> None:
    """No part of an answer that was generated without the context is yielded."""
    server = MemoryServer(stores=False)
    async with connect_to(server.handle) as engine:
        turn, _ = await send_messages(server, engine, 2)
        server.bodies.clear()
        turn, events = await talk(engine, turn, "Short?")
        assert is_chained(server.bodies[0])
        assert not is_chained(server.bodies[1])
        assert server.bodies[1]["store"] is False
    text = "".join(event.delta for event in events if isinstance(event, TextDelta))
    assert "from 5 items" in text
    assert "from 1 items" not in text
    assert list_reasons(events) == ["forgot"]


@STREAMING
async def test_chain_limit_is_learned(streaming: bool) -> None:
    """The count still grows at the limit, but is too low by the oldest exchange."""
    server = MemoryServer(cap=10)
    async with connect_to(server.handle, clock=FakeClock()) as engine:
        turn, wrong, flagged, healed = Turn(), 0, 0, 0
        for number in range(40):
            turn, events = await talk(engine, turn, f"Line {number}", streaming=streaming)
            wrong += not is_coherent(server, turn)
            flagged += any(isinstance(event, ServerForgot) for event in events)
            if count_healed(events):
                assert not is_chained(server.bodies[-1])  # also not on an older anchor
                healed += 1
    assert (wrong, flagged, healed) == ((1, 1, 0) if streaming else (0, 0, 1))
    assert sum(map(is_chained, server.bodies)) > 25


@for_each("usage", ["none", "constant", "new"])
@for_each("stores", [True, False])
async def test_audit_proves_without_usable_counts(usage: str, stores: bool) -> None:
    """With audits, a server that reports no counts is chained on if it lists its items; other counts outweigh them."""
    server = MemoryServer(usage=usage, stores=stores)
    async with connect_to(server.handle, clock=FakeClock()) as engine:
        _, wrong = await send_messages(server, engine, 6)
        assert wrong == 0
        assert sum(map(is_chained, server.bodies)) <= 1
    server.bodies.clear()
    async with connect_to(server.handle, audit_every=1, clock=FakeClock()) as engine:
        _, wrong = await send_messages(server, engine, 6)
        assert wrong == 0
        assert (sum(map(is_chained, server.bodies)) == 5) == (stores and usage == "none")


async def test_a_list_is_no_proof_after_counts_of_another_kind_of_request() -> None:
    """A server that lists items without using them is not believed if any response had a count."""
    server = MemoryServer(cap=0)
    async with connect_to(server.handle, audit_every=1, clock=FakeClock()) as engine:
        turn, _ = await talk(engine, Turn(), ORDINARY.format(1), streaming=False)
        turn, _ = await talk(
            engine, turn, ORDINARY.format(2), tools=[{"type": "function", "name": "f"}]
        )
        assert is_coherent(server, turn)


@pytest.mark.parametrize(
    ("usage", "text"),
    [("apart", ORDINARY), ("honest", " " * 4_500), ("honest", "x"), ("llama", " " * 4_500)],
)
async def test_correct_server_is_never_healed(usage: str, text: str) -> None:
    """Separately counted cached tokens and nearly empty messages cause no healing."""
    server = MemoryServer(usage=usage)
    async with connect_to(server.handle, known_server=KnownServer(remembers=True)) as engine:
        turn, _ = await send_messages(server, engine, 5)
        for _ in range(3):
            turn, events = await talk(engine, turn, text.format(1))
            assert not any(isinstance(event, Healed | ServerForgot) for event in events)


async def test_missing_ancestor_is_a_difference() -> None:
    """A 404 for an ancestor is a difference if the server can list other items."""
    server = MemoryServer()
    async with connect_to(server.handle, audit_every=1, trust="always") as engine:
        turn, _ = await send_messages(server, engine, 3)
        first = get_state(turn).anchors[0].response_id
        del server.stored[first]
        assert (await engine.verify(turn)).agrees is False
        turn, _ = await talk(engine, turn, "And?")
        assert is_coherent(server, turn)
        assert not is_chained(server.bodies[-1])


async def test_no_older_response_is_relied_on_after_a_loss_at_a_trusted_server() -> None:
    """A server that is always trusted is not asked again, and everything is sent after the report."""
    server = MemoryServer()
    async with connect_to(server.handle, trust="always", clock=FakeClock()) as engine:
        turn, _ = await send_messages(server, engine, 3)
        server.stored.clear()
        turn, events = await talk(engine, turn, ORDINARY.format(4))
        assert any(isinstance(event, ServerForgot) for event in events)
        assert {record.status for record in get_state(turn).anchors} == {"lost"}
        turn, _ = await talk(engine, turn, "And?")
    assert is_coherent(server, turn)


async def test_calls_without_context_are_not_run() -> None:
    """The text of the answer stays; its calls are dropped, and everything is sent again."""
    server, runs = MemoryServer(), list[int]()

    @tool
    def add() -> str:
        """Add."""
        runs.append(len(server.contexts[-1]))
        return "done"

    async with connect_to(server.handle, clock=FakeClock()) as engine:
        stack = with_middleware(engine, tools(add, max_rounds=1))
        turn, _ = await send_messages(server, stack, 6)
        server.stored.clear()
        server.calls_tool = True
        async with stack.stream(turn.append(user("Call add."))) as stream:
            async for event in stream:
                if isinstance(event, ServerForgot):
                    assert runs == []
        assert runs
        assert min(runs) > len(turn)
        assert sum(isinstance(block, AssistantBlock) for block in stream.turn.blocks) >= 8


async def test_changed_instructions_cause_a_full_send() -> None:
    """With changed instructions, a loss of the context could not be detected by the token count."""
    server = MemoryServer()
    async with connect_to(server.handle, clock=FakeClock()) as engine:
        turn, _ = await send_messages(server, engine, 6)
        assert is_chained(server.bodies[-1])
        server.stored.clear()
        changed = turn.insert(0, system("Be brief."))
        assert engine.plan(changed.append(user("And?"))).fallback == "untrusted"
        await talk(engine, changed, "And?")
    assert not is_chained(server.bodies[-1])
    assert len(server.contexts[-1]) == len(turn) + 1


def test_an_unknown_level_of_trust_is_rejected() -> None:
    """The error for an unknown level of trust lists the valid levels."""
    unknown: Any = "sometimes"
    with pytest.raises(InvalidSetting, match="earned, always, never"):
        connect("responses:http://127.0.0.1:9/v1#m", trust=unknown)


async def test_a_dry_run_does_not_hide_stored_evidence() -> None:
    """A plan before the first request of a process reads nothing, and the request then uses what is stored."""
    store, server = EvidenceStore(), MemoryServer(lists=False)
    with serve_handler(server.handle) as url:
        settings: Any = {"max_retries": 0, "evidence_store": store}
        async with connect(f"responses:{url}#m", **settings) as engine:
            turn, _ = await send_messages(server, engine, 6)
        async with connect(f"responses:{url}#m", **settings) as engine:
            turn = turn.append(user("And?"))
            assert engine.plan(turn, streaming=True).conditional
            assert (await engine.probe_and_plan(turn, streaming=True)).anchor
            assert engine.plan(turn, streaming=True).anchor


async def test_engine_continues_after_its_evidence_store_is_closed() -> None:
    """A closed store does not prevent an answer, and the next attached store replaces it."""
    first, second = EvidenceStore(), EvidenceStore()
    async with connect_to(MemoryServer().handle) as engine:
        await engine.attach_evidence(first)
        first.is_closed = True
        turn, _ = await talk(engine, Turn(), ORDINARY.format(1))
        assert (len(turn), first.saved) == (2, {})
        await engine.attach_evidence(second)
        await talk(engine, turn, ORDINARY.format(2))
    assert second.saved


async def test_requests_for_other_models_while_evidence_is_saved() -> None:
    """An answer is not lost because a request for another model starts while its evidence is saved."""

    class SlowStore(EvidenceStore):
        async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
            engine.evidence.check(engine.scope, "another", streaming=True)
            await super().save_evidence(key, form)

    store = SlowStore()
    async with connect_to(MemoryServer().handle) as engine:
        await engine.attach_evidence(store)
        turn, _ = await talk(engine, Turn(), ORDINARY.format(1))
    assert len(turn) == 2
    assert store.saved


async def fail_twice(server: MemoryServer, engine: Engine, *, streaming: bool) -> Turn:
    """Return a Turn whose next request was answered with an error of the server twice, because it was chained."""
    turn, _ = await send_messages(server, engine, 6, streaming=streaming)
    assert is_chained(server.bodies[-1])
    server.fails_chained = True
    for _ in range(2):
        with pytest.raises(ServerFailed):
            await talk(engine, turn, ORDINARY.format(6), streaming=streaming)
    return turn


@STREAMING
async def test_server_that_fails_chained_requests_gets_full_ones(streaming: bool) -> None:
    """After two errors in a row everything is sent, and the plan and an event say why."""
    server = MemoryServer()
    async with connect_to(server.handle) as engine:
        turn = await fail_twice(server, engine, streaming=streaming)
        turn, events = await talk(engine, turn, ORDINARY.format(6), streaming=streaming)
    assert [event.reason for event in events if isinstance(event, ModeChanged)] == ["fails"]
    assert not is_chained(server.bodies[-1])
    assert is_coherent(server, turn)
    plans = [event.plan for event in events if isinstance(event, RequestPlanned)]
    assert "with server errors" in plans[0].explain()


@STREAMING
async def test_server_that_failed_chained_requests_gets_them_later(streaming: bool) -> None:
    """After a while, requests are chained again."""
    server, clock = MemoryServer(), FakeClock()
    async with connect_to(server.handle, clock=clock) as engine:
        turn = await fail_twice(server, engine, streaming=streaming)
        turn, _ = await talk(engine, turn, ORDINARY.format(6), streaming=streaming)
        server.fails_chained = False
        clock.now += BASE_COOLDOWN
        turn, events = await talk(engine, turn, ORDINARY.format(7), streaming=streaming)
    assert is_chained(server.bodies[-1])
    assert is_coherent(server, turn)
    assert count_healed(events) == 0
