"""A limited campaign of the law with servers whose memory misbehaves."""

import json
import random
from typing import Any

import pytest

from kedge.providers import connect
from kedge.testing import serve
from kedge.turns import Turn, user
from law.memory_fuzzer import BEHAVIORS, LATE_BEHAVIORS, TRANSPORTS, MemoryFuzzer, MemoryStats
from law.networks import MemoryNetwork
from law.program_fuzzer import DOORS, ProgramFuzzer

CAPPED = {"caps the chain", "caps the chain early"}


@pytest.mark.parametrize(
    ("behavior", "transport"),
    [
        (behavior, transport)
        for number, behavior in enumerate(sorted(BEHAVIORS))
        for transport in ("whole", ("stream", "websocket")[number % 2])
    ],
)
async def test_no_behavior_shows_a_wrong_answer(
    behavior: str, transport: str, network: MemoryNetwork
) -> None:
    """A capped chain may show one flagged wrong answer when streaming; other behaviors show none.

    Half of them are streamed over HTTP, half over WebSocket; ``make campaign`` runs all.
    """
    rng = random.Random(f"{behavior}/{transport}")
    stats = await MemoryFuzzer(rng, behavior, transport, network=network).run(10)
    allowed = 1 if behavior in CAPPED and transport != "whole" else 0
    assert stats.wrong <= allowed, stats.first_wrong
    assert stats.flagged == stats.wrong
    assert stats.answers == 10


@pytest.mark.parametrize("behavior", sorted(BEHAVIORS))
async def test_no_behavior_shows_a_wrong_answer_in_an_object(
    behavior: str, network: MemoryNetwork
) -> None:
    """Conversation objects are relied on as chains are: no wrong answer, and every dry run is that of its request."""
    rng = random.Random(f"{behavior}/object")
    transport = rng.choice(["stream", "whole"])
    options: Any = {"mode": "conversation", "network": network}
    stats = await MemoryFuzzer(rng, behavior, transport, **options).run(8)
    assert (stats.wrong - stats.flagged, stats.contradicted) == (0, 0), stats.first_wrong
    assert stats.wrong <= (1 if behavior in CAPPED and transport == "stream" else 0)
    assert stats.answers == 8


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("late", LATE_BEHAVIORS)
async def test_server_that_starts_to_forget_shows_one_flagged_answer(
    late: str, transport: str, network: MemoryNetwork
) -> None:
    """A server that starts to forget shows at most the answer being streamed, and it is flagged."""
    fuzzer = MemoryFuzzer(random.Random(late), "honest", transport, network=network)
    stats = await fuzzer.run(14, late=late)
    assert stats.wrong <= (0 if transport == "whole" else 1), stats.first_wrong
    assert stats.flagged == stats.wrong


@pytest.mark.parametrize("content", ["reasoning", "image"])
@pytest.mark.parametrize("behavior", ["honest", "stores nothing", "counts only new tokens"])
async def test_reasoning_and_images_hide_no_loss(
    behavior: str, content: str, network: MemoryNetwork
) -> None:
    """No answer is wrong, and every dry run is that of its request."""
    rng = random.Random(f"{behavior}/{content}")
    stats = await MemoryFuzzer(rng, behavior, "stream", content=content, network=network).run(10)
    assert (stats.wrong, stats.contradicted) == (0, 0), stats.first_wrong
    assert stats.answers == 10


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_losses_of_a_trusted_server_are_reported(
    transport: str, network: MemoryNetwork
) -> None:
    """With ``trust="always"`` every loss that a count can show is reported."""
    stats = await MemoryFuzzer(
        random.Random(3), "stores nothing", transport, trust="always", network=network
    ).run(12)
    assert stats.wrong > 0
    assert (stats.unreported, stats.contradicted) == (0, 0)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("behavior", ["honest", "stores nothing", "caps the chain early"])
@pytest.mark.parametrize("streaming", [True, False])
async def test_programs_get_no_unreported_wrong_answer(
    behavior: str, door: str, streaming: bool, network: MemoryNetwork
) -> None:
    """A stream cannot be held back, so one answer in flight may be wrong, and it is reported."""
    rng = random.Random(f"{behavior}/{door}")
    fuzzer = ProgramFuzzer(rng, behavior, door, streaming, network=network, client="httpx")
    stats = await fuzzer.run(12, edits=True)
    assert stats.wrong <= (streaming and behavior != "honest"), stats.first_wrong
    assert stats.flagged == stats.wrong
    assert stats.answers == 12


async def run_forgetting(
    door: str, trust: str, network: MemoryNetwork, count: int, *, streaming: bool = True
) -> MemoryStats:
    """Send messages through a door to a server that stores nothing."""
    options: Any = {"network": network, "client": "httpx"}
    return await ProgramFuzzer(
        random.Random(3), "stores nothing", door, streaming, trust, **options
    ).run(count)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("streaming", [True, False])
async def test_losses_of_a_trusted_server_are_in_the_report(
    door: str, streaming: bool, network: MemoryNetwork
) -> None:
    """With ``trust="always"`` a chained client and the proxy report every loss that a count can show."""
    stats = await run_forgetting(door, "always", network, 12, streaming=streaming)
    assert stats.wrong > 0
    assert stats.flagged > 0
    assert stats.unreported == 0, stats.first_wrong


@pytest.mark.parametrize("door", DOORS)
async def test_a_server_that_is_never_trusted_is_never_chained_on(
    door: str, network: MemoryNetwork
) -> None:
    """With ``trust="never"`` no answer is wrong, whatever the server does."""
    stats = await run_forgetting(door, "never", network, 8)
    assert (stats.wrong, stats.chained, stats.answers) == (0, 0, 8)


@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize(("trust", "limit"), [("always", 1.02), ("earned", 1.25)])
async def test_an_honest_server_is_sent_little_more_than_the_best_plan(
    trust: str, limit: float, reasoning: bool
) -> None:
    """A conversation of 20 long messages with an unknown server costs little more than the messages."""
    params = {"include": ["reasoning.encrypted_content"]} if reasoning else {}
    sent = best = 0
    with serve() as server:
        server.faults.set("anonymous")
        settings: Any = {"trust": trust, "params": params, "max_retries": 0}
        async with connect(f"responses:{server.base_url}#practice", **settings) as engine:
            turn = Turn()
            for number in range(20):
                text = f"Think about {number}. " + "These are words of a long message. " * 6
                turn = await engine.run(turn.append(user(text)))
        for request in server.requests:
            if request.method == "POST":
                sent += len(json.dumps(request.body["input"]))
                best += len(json.dumps(request.body["input"][-1:]))
    assert sent <= limit * best
