"""The rounds of a seed: one for each door to a server, with everything that the seed chooses, and their counts.

A round sends edited requests through one door with one transport and one level of trust, to servers with one behavior,
and counts its requests and the problems that it found. The seed chooses all of this, so that a round can be repeated.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from kedge.evidence.server_evidence import TRUST_LEVELS, Trust
from law import conversation_fuzzer, engine_fuzzer, memory_fuzzer, record_fuzzer
from law.chat_fuzzer import ChatFuzzer
from law.engine_fuzzer import EngineFuzzer, FuzzStats
from law.memory_fuzzer import BEHAVIORS, CONTENTS, LATE_BEHAVIORS, MemoryFuzzer, MemoryStats
from law.networks import MemoryNetwork, Network, SocketNetwork
from law.object_fuzzer import ObjectFuzzer, ObjectStats
from law.page_fuzzer import PageFuzzer, PageStats
from law.program_fuzzer import CLIENTS, ProgramFuzzer
from law.record_views import RecordStats, is_create_request

ACTIONS = 150
"""The number of actions of a script, of which a third are requests."""
MESSAGES = 40
OBJECT_ACTIONS = 25
STORED_ACTIONS = 40
RECORD_ACTIONS = 12
PAGE_ACTIONS = 40
UNSUITABLE = frozenset({"report_usage=none", "lone_surrogate"})
"""Faults that are not used with programs: without counts it cannot be recognized that a server does not use what it
lists, and the SDK cannot send a lone surrogate back."""
SOCKETS_EVERY = 10
"""One seed in this number runs over sockets, the others in memory."""
PROBLEMS = ("incoherent", "false explanations", "lost")
"""What must not be found: a request with another context than its Turn, something that Kedge says about a request and
that is not so, and a message, an answer or a tool's run that is missing or repeated."""


@dataclass
class Round:
    """One result: what was chosen for it, its counts, and its first problem."""

    seed: int
    door: str
    network: Network
    rng: random.Random = field(init=False)
    counts: Counter[str] = field(default_factory=Counter[str])
    problem: str = ""
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.door}/{self.seed}")
        self.transport = "memory" if isinstance(self.network, MemoryNetwork) else "sockets"
        self.trust: Trust = "earned"

    def choose_trust(self) -> Trust:
        """Choose a level of trust, mostly the default."""
        self.trust = self.rng.choices(TRUST_LEVELS, (6, 1, 1))[0]
        return self.trust

    def add(self, problem: str = "", **counts: int) -> None:
        """Add counts, and retain the first problem."""
        self.counts.update({name.replace("_", " "): count for name, count in counts.items()})
        self.problem = self.problem or problem

    def count_requests(self) -> None:
        """Count the requests that the servers of this round received, and by door, mode, transport and trust."""
        found = [e for server in self.network.servers for e in server.requests]
        for request in filter(is_create_request, found):
            kinds = (
                f"door {self.door.partition(',')[0]}",
                f"mode {_find_mode(request.body)}",
                f"transport {self.transport} {request.transport}",
                f"trust {self.trust}",
            )
            self.counts.update(("requests", *kinds))

    @property
    def has_problem(self) -> bool:
        """Whether something was found that must not be."""
        return any(self.counts[name] for name in PROBLEMS)


def _find_mode(body: Any) -> str:
    members: dict[str, Any] = body if isinstance(body, dict) else {}
    if members.get("previous_response_id"):
        return "chained"
    return "conversation" if members.get("conversation") else "full"


async def run_engine(result: Round, fuzzer: type[EngineFuzzer] = EngineFuzzer) -> None:
    """Edit a Turn in every way, over HTTP and WebSocket, in all modes, with two servers that fail."""
    stats = FuzzStats()
    settings = result.rng.choice(list(engine_fuzzer.TRANSPORTS.values()))
    async with fuzzer(result.rng, stats, settings=settings, network=result.network) as player:
        await player.run(engine_fuzzer.choose_actions(result.rng, ACTIONS))
    result.add(
        stats.first_incoherent,
        compared=stats.answers,
        incoherent=stats.incoherent + stats.stale_reasoning,
        false_explanations=stats.false,
        lost=stats.lost,
        sent_bytes=stats.sent_bytes,
        best_bytes=stats.best_bytes,
        full_bytes=stats.full_bytes,
    )


async def run_chat(result: Round) -> None:
    """Run the same scripts with a Chat, whose states are half of the time encrypted."""
    await run_engine(result, ChatFuzzer)


async def run_memory(result: Round) -> None:
    """Run a conversation with a server whose memory misbehaves."""
    rng, stats = result.rng, MemoryStats()
    behavior = rng.choice(list(BEHAVIORS))
    transport = rng.choice(list(memory_fuzzer.TRANSPORTS))
    late, trust = rng.choice(("", *LATE_BEHAVIORS)), result.choose_trust()
    content = rng.choice(CONTENTS)
    fuzzer = MemoryFuzzer(rng, behavior, transport, stats, trust, content, network=result.network)
    await fuzzer.run(MESSAGES, late=late, edits=rng.random() < 0.5)
    # A stream may show one wrong answer each time a server begins to forget: at its cap, and later.
    in_flight = (bool(late) + behavior.startswith("caps")) if transport != "whole" else 0
    _add_memory(result, stats, in_flight)


async def run_program(result: Round) -> None:
    """Run a program that replays its history, with a server whose memory misbehaves."""
    rng, stats, records = result.rng, MemoryStats(), RecordStats()
    behaviors = [name for name in BEHAVIORS if UNSUITABLE.isdisjoint(BEHAVIORS[name])]
    behavior, streaming = rng.choice(behaviors), rng.random() < 0.5
    late = rng.choice(("", *LATE_BEHAVIORS))
    has_reasoning, trust = rng.random() < 0.3, result.choose_trust()
    fuzzer = ProgramFuzzer(rng, behavior, result.door, streaming, trust, has_reasoning, stats)
    fuzzer.records, fuzzer.network = records, result.network
    fuzzer.client = "httpx" if result.transport == "memory" else rng.choice(CLIENTS)
    await fuzzer.run(MESSAGES, late=late, edits=rng.random() < 0.5)
    # A stream cannot be held back: it may show one wrong answer each time that a server begins to forget.
    in_flight = (bool(late) + bool(BEHAVIORS[behavior])) if streaming else 0
    _add_memory(result, stats, in_flight)
    result.add(records.first_difference, false_explanations=records.differences)


def _add_memory(result: Round, stats: MemoryStats, in_flight: int) -> None:
    """Add the counts of a server that misbehaves.

    An answer without the context of its Turn is accepted if it was in flight and is reported, or if the server is
    always trusted and its count does not show the loss.
    """
    if result.trust == "always":  # its answers are shown whatever the server did
        incoherent = stats.unreported
    else:
        in_flight = 0 if result.trust == "never" else in_flight
        incoherent = max(stats.wrong - in_flight, stats.wrong - stats.flagged)
    result.add(
        f"{stats.first_wrong}, {stats.contradicted} dry runs contradicted",
        compared=stats.answers,
        incoherent=incoherent,
        accepted=stats.wrong - incoherent,
        false_explanations=stats.contradicted,
    )


async def run_object(result: Round) -> None:
    """Run branches in conversation objects that several processes continue."""
    stats = ObjectStats()
    await ObjectFuzzer(result.rng, stats, network=result.network).run(OBJECT_ACTIONS)
    result.add(
        stats.first_wrong,
        compared=stats.answers,
        incoherent=stats.unreported,
        accepted=stats.flagged,
        lost=stats.repeated,
    )


async def run_conversation(result: Round) -> None:
    """Run stored conversations with forks, edits and several writers, and compare the store with the memory."""
    actions = result.rng.choices(
        conversation_fuzzer.ACTIONS, conversation_fuzzer.WEIGHTS, k=STORED_ACTIONS
    )
    with TemporaryDirectory() as folder:
        fuzzer = conversation_fuzzer.ConversationFuzzer(
            result.rng, f"{folder}/store.db", network=result.network
        )
        try:
            async with fuzzer:
                await fuzzer.run(actions)
                assert not await fuzzer.store.verify()
        except AssertionError as error:
            result.add(f"{error}", incoherent=1)
        result.add(compared=fuzzer.checked_count)


async def run_record(result: Round) -> None:
    """Run stored conversations, and compare everything that Kedge says about each request with the wire."""
    stats = RecordStats()
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "store.db")
        fuzzer = record_fuzzer.RecordFuzzer(result.rng, path, stats=stats, network=result.network)
        async with fuzzer:
            await fuzzer.run(record_fuzzer.choose_actions(result.rng, RECORD_ACTIONS))
    result.add(stats.first_difference, false_explanations=stats.differences)


async def run_page(result: Round) -> None:
    """Run conversations through the API of the page."""
    stats, records = PageStats(), RecordStats()
    fuzzer = PageFuzzer(result.rng, result.choose_trust(), stats, records, result.network)
    await fuzzer.run(PAGE_ACTIONS)
    result.add(
        stats.first_problem or records.first_difference,
        compared=stats.answers,
        incoherent=stats.incoherent,
        false_explanations=records.differences,
        lost=stats.lost,
    )


ROUNDS: dict[str, tuple[Callable[[Round], Awaitable[None]], int]] = {
    "engine": (run_engine, 5),
    "engine, misbehaving server": (run_memory, 5),
    "engine, conversation objects": (run_object, 2),
    "Chat": (run_chat, 2),
    "chain": (run_program, 2),
    "proxy": (run_program, 1),
    "Conversation": (run_conversation, 2),
    "Conversation, all views": (run_record, 1),
    "page": (run_page, 1),
}
"""The rounds of a seed, and how often it runs each; a name starts with that of the door."""


def run_seed(seed: int) -> list[Round]:
    """Run the rounds of a seed."""
    logging.getLogger().addHandler(logging.NullHandler())  # broken connections are intended here
    return [
        anyio.run(_run_round, seed * 10 + number, door)
        for door, (_, times) in ROUNDS.items()
        for number in range(times)
    ]


def run_round(number: int, door: str) -> Round:
    """Run one round again, by its number."""
    return anyio.run(_run_round, number, door)


async def _run_round(number: int, door: str) -> Round:
    is_memory = (number // 10) % SOCKETS_EVERY != 0
    network = MemoryNetwork() if is_memory else SocketNetwork()
    result = Round(number, door, network)
    started = time.process_time()
    with network.install() if isinstance(network, MemoryNetwork) else nullcontext():
        await ROUNDS[door][0](result)
    result.count_requests()
    result.cpu_seconds = time.process_time() - started
    result.network.servers.clear()  # what remains is sent to another process
    return result
