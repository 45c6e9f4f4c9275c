"""Plays conversations against strict servers, edits them in every way, and judges every request.

The player knows nothing of digests or plans. It keeps its own memory of what each response holds, as
plain tuples of what was said, and compares it with what the server's model really saw. From the same
memory it works out the shortest request that a client could have made with what it can know.
"""

import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from kedge.engines import Engine
from kedge.errors import EngineError
from kedge.events import TextDelta
from kedge.events.run import Healed
from kedge.middleware import repair, two_phase, with_middleware
from kedge.planning import get_state
from kedge.providers import connect
from kedge.server.access import Exchange
from kedge.testing import TestServer, serve
from kedge.turns import Turn, user
from law.edits import EDITS, answered
from wire import Said, said, seen, sent

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("alpha", "beta")
)
ASKS = (
    "Please call alpha.",
    "Please call alpha and call beta.",
    "Think about {n}.",
    "What did I say first?",
    "How many messages are there? {n}",
    "Line {n}",
    "Line {n} " + "with a longer tail of words " * 20,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "ask": {},
    "ask stateless": {"mode": "stateless"},
    "ask unstored": {"store": False},
    "ask in a conversation": {"mode": "conversation"},
}
SERVER_ACTS = (
    "forget",
    "delete",
    "expire",
    "cut",
    "forget silently",
    "refuse",
    "hang up",
    "move",
    "fork",
)
ACTIONS = (*OPTIONS, "ask and leave", *EDITS, *SERVER_ACTS)
# What people do most; everything else happens now and then.
WEIGHTS = [12 if name == "ask" else 2 if name in EDITS else 1 for name in ACTIONS]


WORLDS: dict[str, dict[str, Any]] = {
    "http": {},
    "websocket": {"transport": "websocket"},
    "websocket, unstored": {"transport": "websocket", "params": {"store": False}},
}
"""How requests may travel: settings of the engines."""

HOUR = 3600.0
MONTH = 30 * 24 * HOUR


@dataclass(slots=True)
class Tally:
    """What came of a campaign; bytes are those of what was said in chained requests."""

    requests: int = 0
    incoherent: int = 0
    rejected: int = 0
    healed: int = 0
    failed: int = 0
    sent_bytes: int = 0
    best_bytes: int = 0
    full_bytes: int = 0
    first_incoherent: str = ""


@dataclass(slots=True)
class Held:
    """What one response holds, as the player remembers it."""

    server: int
    said: tuple[Said, ...]
    usable: bool
    expires: float


@dataclass
class Player:
    """One campaign: two servers, some branches of a conversation, and a tally."""

    rng: random.Random
    tally: Tally = field(default_factory=Tally)
    branches: list[Turn] = field(default_factory=lambda: [Turn()])
    servers: list[TestServer] = field(default_factory=list[TestServer])
    engines: list[Engine] = field(default_factory=list[Engine])
    held: dict[str, Held] = field(default_factory=dict[str, Held])
    distrusted: set[int] = field(default_factory=set[int])
    where: int = 0
    number: int = 0
    clock: float = 1_000_000.0
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of the engines, such as their transport."""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        for index in range(2):
            server = self.stack.enter_context(serve())
            engine = connect(
                f"responses:{server.base_url}#practice",
                scope=f"server-{index}",
                max_retries=0,
                clock=lambda: self.clock,
                **self.settings,
            )
            self.servers.append(server)
            self.engines.append(engine)
            self.stack.push_async_callback(engine.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    @property
    def turn(self) -> Turn:
        """The branch that is being played."""
        return self.branches[-1]

    @turn.setter
    def turn(self, turn: Turn) -> None:
        self.branches[-1] = turn

    @property
    def server(self) -> TestServer:
        """The server that is being spoken to."""
        return self.servers[self.where]

    async def play(self, actions: Sequence[str]) -> None:
        """Do these things one after the other."""
        for name in actions:
            if name in EDITS:
                self.turn = EDITS[name](self.turn, self.rng)
            elif name in OPTIONS:
                await self.ask(OPTIONS[name])
            elif name == "ask and leave":
                await self.ask_and_leave()
            else:
                self.disturb(name)

    async def ask(self, options: dict[str, Any]) -> None:
        """Say something, and judge every request that this makes."""
        self.number += 1
        self.clock += 1
        text = self.rng.choice(ASKS).format(n=self.number)
        asked = answered(self.turn).append(user(text))
        known = self._known(asked)
        since = len(self.server.requests)
        streaming = self.rng.random() < 0.5
        engine = self._engine()
        healed = 0
        try:
            async with engine.stream(asked, tools=TOOLS, streaming=streaming, **options) as stream:
                async for event in stream:
                    if isinstance(event, Healed):
                        healed += 1
                        self._learn(event)
        except EngineError as error:
            self.tally.failed += 1
            self.turn = error.turn or asked
        else:
            self.turn = stream.turn
            finished = stream.answers[-1].turn  # as the engine left it, before any way out
            self._judge(finished, since, known, chained=not options)
            self._remember(finished, stored=not options)
        self.tally.healed += healed
        self.server.faults.clear()

    async def ask_and_leave(self) -> None:
        """Say something, and stop listening at the first word."""
        asked = answered(self.turn).append(user("Write 60 words."))
        try:
            async with self._engine().stream(asked) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        break
        except EngineError as error:
            asked = error.turn or asked
        self.turn = asked
        self.server.faults.clear()

    def _engine(self) -> Engine:
        """The engine, now and then under a middleware that edits the Turn on its way in or out."""
        edit = EDITS[self.rng.choice(list(EDITS))]
        before, after = self.rng.choices(("edit", ""), (1, 3), k=2)

        def edited(turn: Turn) -> Turn:
            return edit(turn, self.rng)

        layers = [repair()]
        if before:
            layers.insert(0, two_phase(edited, name="in"))
        if after and not before:
            layers.insert(0, two_phase(None, self._shuffled, name="out"))
        return with_middleware(self.engines[self.where], *layers)

    def _shuffled(self, turn: Turn) -> Turn:
        """What a middleware may do on the way out without touching the answer: edit the past."""
        kept = [block for block in turn.blocks if block.response_id != turn.blocks[-1].response_id]
        return turn.remove(self.rng.choice(kept).id) if kept else turn

    def disturb(self, name: str) -> None:
        """Do something to the server, or go elsewhere."""
        match name:
            case "forget":
                self.server.forget()
            case "delete":
                self.server.faults.set("not_found=vllm", times=1)
                self.server.forget()
            case "expire":
                self.clock += 31 * 86_400
                self.server.clock.advance(days=31)
            case "cut":
                self.server.faults.set(f"cut_after_events={self.rng.randrange(8)}", times=1)
            case "forget silently":
                self.server.faults.set("forget_silently,echo=no", times=1)
            case "refuse":
                self.server.faults.set("status=500", times=1)
            case "hang up":
                self.server.hang_up()
            case "move":
                self.where = 1 - self.where
            case _:
                self.branches.append(self.turn)
                self.rng.shuffle(self.branches)

    def _judge(self, turn: Turn, since: int, known: list[Held], *, chained: bool) -> None:
        exchanges = [e for e in self.server.requests[since:] if _asks(e)]
        self.tally.requests += len(exchanges)
        self.tally.rejected += sum(exchange.status >= 400 for exchange in exchanges)
        spoken = sent(turn)
        if seen(exchanges[-1].context) != spoken:
            self.tally.incoherent += 1
            words = f"seen {seen(exchanges[-1].context)}\nsaid {spoken}"
            self.tally.first_incoherent = self.tally.first_incoherent or words
        if chained:
            for place, exchange in enumerate(exchanges):
                best = weight(spoken) if place else self._best(spoken, known)
                self.tally.sent_bytes += weight(seen(exchange.body["input"]))
                self.tally.best_bytes += best
                self.tally.full_bytes += weight(spoken)

    def _known(self, turn: Turn) -> list[Held]:
        """What the responses that this Turn knows of hold, as far as the server can be asked."""
        if self.where in self.distrusted:
            return []
        ids = [record.response_id for record in get_state(turn).anchors]
        found = [self.held[each] for each in ids if each in self.held]
        return [
            each
            for each in found
            if each.usable and each.server == self.where and each.expires > self.clock
        ]

    def _best(self, spoken: list[Said], known: list[Held]) -> int:
        """The least that had to be said, given what is known to be held."""
        lengths = [len(each.said) for each in known if tuple(spoken[: len(each.said)]) == each.said]
        return weight(spoken[max(lengths, default=0) :])

    def _remember(self, turn: Turn, *, stored: bool) -> None:
        response_id = turn.blocks[-1].response_id
        if response_id and response_id not in self.held:
            self.held[response_id] = Held(
                self.where, tuple(said(turn.blocks)), stored, self.clock + MONTH - HOUR
            )

    def _learn(self, healed: Healed) -> None:
        """What a client knows from now on: what is lost, and who cannot be trusted to remember."""
        for lost in healed.lost:
            if lost in self.held:
                self.held[lost].usable = False
        if healed.reason in ("forgot", "unsupported"):
            self.distrusted.add(self.where)


def _asks(exchange: Exchange) -> bool:
    return exchange.path == "/v1/responses" and exchange.method == "POST"


def weight(spoken: Sequence[Said]) -> int:
    """The bytes of what was said."""
    return sum(len(json.dumps(each)) for each in spoken)


def random_actions(rng: random.Random, count: int) -> list[str]:
    """A script: mostly asking, with every kind of edit and accident in between."""
    return rng.choices(ACTIONS, WEIGHTS, k=count)
