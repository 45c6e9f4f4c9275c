"""Runs conversations with strict servers, edits them in every way, and checks every request.

The fuzzer does not use digests or plans. It records the context of each response as plain tuples, and
compares it with the context of the server's model. From the same records it computes the shortest request
that a client could have sent with the available information.
"""

import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from kedge.engines import Engine
from kedge.engines.base import RunStream
from kedge.errors import EngineError
from kedge.events import Event, TextDelta
from kedge.events.run import AnswerFinished, Healed
from kedge.middleware import repair, two_phase, with_middleware
from kedge.planning import get_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import ReasoningBlock, Turn, user
from law.networks import Network, SocketNetwork
from law.record_views import find_false_events, is_create_request
from law.turn_edits import EDITS, answer_open_calls
from normalization import NormalForm, expected_context, normalize_blocks, normalize_items

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("alpha", "beta")
)
PROMPTS = (
    "Please call alpha.",
    "Please call alpha and call beta.",
    "Think about {n}.",
    "What did I say first?",
    "How many messages are there? {n}",
    "Line {n}",
    "Line {n} " + "with a longer tail of words " * 20,
)
REQUEST_OPTIONS: dict[str, dict[str, Any]] = {
    "ask": {},
    "ask stateless": {"mode": "stateless"},
    "ask unstored": {"store": False},
    "ask in a conversation": {"mode": "conversation"},
}
SERVER_ACTIONS = (
    *("forget", "delete", "expire", "cut", "forget silently", "refuse", "hang up", "move", "fork"),
)
ACTIONS = (*REQUEST_OPTIONS, "ask and leave", *EDITS, *SERVER_ACTIONS)
# Requests are the most frequent; all other actions are occasional.
WEIGHTS = [12 if name == "ask" else 2 if name in EDITS else 1 for name in ACTIONS]


TRANSPORTS: dict[str, dict[str, Any]] = {
    "http": {},
    "websocket": {"transport": "websocket"},
    "websocket, unstored": {"transport": "websocket", "params": {"store": False}},
}
"""Settings of the engines for each transport."""

Context = tuple[NormalForm, ...]
HOUR = 3600.0
MONTH = 30 * 24 * HOUR


@dataclass(slots=True)
class FuzzStats:
    """The results of a campaign; bytes are those of the messages in chained requests."""

    requests: int = 0
    answers: int = 0
    incoherent: int = 0
    sent_bytes: int = 0
    best_bytes: int = 0
    full_bytes: int = 0
    reasoning: int = 0
    """The number of encrypted reasoning items that were sent again."""
    stale_reasoning: int = 0
    """How many of them were derived from another context than the one they were sent with."""
    false: int = 0
    """Requests about which the events of their run say something else than the wire."""
    lost: int = 0
    """Messages and answers that the Turn after their run does not contain."""
    first_incoherent: str = ""
    """The first problem of any kind."""

    def report(self, problem: str) -> None:
        """Retain the first problem."""
        self.first_incoherent = self.first_incoherent or problem


@dataclass(slots=True)
class KnownResponse:
    """The context of one response, as recorded by the fuzzer."""

    server_index: int
    context: Context
    usable: bool
    expires_at: float


@dataclass
class EngineFuzzer:
    """One campaign: two servers, branches of a conversation, and statistics."""

    rng: random.Random
    stats: FuzzStats = field(default_factory=FuzzStats)
    branches: list[Turn] = field(default_factory=lambda: [Turn()])
    servers: list[TestServer] = field(default_factory=list[TestServer])
    engines: list[Engine] = field(default_factory=list[Engine])
    known_responses: dict[str, KnownResponse] = field(default_factory=dict[str, KnownResponse])
    reasoning_contexts: dict[str, Context] = field(default_factory=dict[str, Context])
    """The context of the response of each reasoning item, with its output."""
    untrusted_servers: set[int] = field(default_factory=set[int])
    server_index: int = 0
    prompt_count: int = 0
    clock: float = 1_000_000.0
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of the engines, such as their transport."""
    network: Network = field(default_factory=SocketNetwork)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _is_edited: bool = False
    """Whether a middleware edits the Turn before the current request."""

    async def __aenter__(self) -> Self:
        for index in range(2):
            server = await self.stack.enter_async_context(self.network.open_server())
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
        """Return the current branch."""
        return self.branches[-1]

    @turn.setter
    def turn(self, turn: Turn) -> None:
        self.branches[-1] = turn

    @property
    def server(self) -> TestServer:
        """Return the current server."""
        return self.servers[self.server_index]

    async def run(self, actions: Sequence[str]) -> None:
        """Run these actions one after the other."""
        for name in actions:
            if name in EDITS:
                self.turn = EDITS[name](self.turn, self.rng)
            elif name in REQUEST_OPTIONS:
                await self.send(REQUEST_OPTIONS[name])
            elif name == "ask and leave":
                await self.send_and_disconnect()
            else:
                self.disturb(name)

    async def send(self, options: dict[str, Any]) -> None:
        """Send a message, and check every request that this causes."""
        self.prompt_count += 1
        self.clock += 1
        text = self.rng.choice(PROMPTS).format(n=self.prompt_count)
        turn = answer_open_calls(self.turn).append(user(text))
        known = self._usable_responses(turn)
        since = len(self.server.requests)
        streaming = self.rng.random() < 0.5
        stream = self._open_stream(turn, tools=TOOLS, streaming=streaming, **options)
        events: list[Event] = []
        try:
            async with stream:
                async for event in stream:
                    events.append(event)
                    if isinstance(event, Healed):
                        self._record_healing(event)
        except EngineError as error:
            self._store_failed(error, turn)
            self._check_loss([text], self.turn)
        else:
            self.stats.answers += 1
            self._store_finished(stream)
            # As the engine returned it, before middleware changes it.
            finished = [each.turn for each in events if isinstance(each, AnswerFinished)][-1]
            self._check_requests(finished, since, known, chained=not options)
            self._check_loss([text], finished)
            self._check_events(events, since)
            self._record_response(finished, stored=not options)
        self.server.faults.clear()

    def _open_stream(self, turn: Turn, **options: Any) -> RunStream[Any]:
        return self._build_engine().stream(turn, **options)

    def _store_finished(self, stream: Any) -> None:
        """Continue with the Turn of a finished run."""
        self.turn = stream.turn

    def _store_failed(self, error: EngineError, turn: Turn) -> None:
        """Continue with the Turn of a failed run."""
        self.turn = error.turn or turn

    def _check_loss(self, texts: Sequence[str], turn: Turn) -> None:
        """Check that a Turn contains these texts, unless an edit of the middleware may have removed them."""
        found = str(normalize_blocks(turn.blocks))
        missing = [text for text in texts if not self._is_edited and text not in found]
        self.stats.lost += len(missing)
        if missing:
            self.stats.report(f"lost {missing} from {found}")

    def _check_events(self, events: Sequence[Event], since: int) -> None:
        wire = [each for each in self.server.requests[since:] if is_create_request(each)]
        differences = find_false_events(events, wire)
        self.stats.false += bool(differences)
        if differences:
            self.stats.report(f"{differences}")

    async def send_and_disconnect(self) -> None:
        """Send a message, and stop reading at the first text."""
        turn = answer_open_calls(self.turn).append(user("Write 60 words."))
        try:
            async with self._open_stream(turn) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        break
            self.turn = turn
        except EngineError as error:
            self._store_failed(error, turn)
        self.server.faults.clear()

    def _build_engine(self) -> Engine:
        """Return the engine, sometimes with a middleware that edits the Turn before or after it."""
        edit = EDITS[self.rng.choice(list(EDITS))]
        before, after = self.rng.choices(("edit", ""), (1, 3), k=2)
        self._is_edited = bool(before)

        def edited(turn: Turn) -> Turn:
            return edit(turn, self.rng)

        layers = [repair()]
        if before:
            layers.insert(0, two_phase(edited, name="in"))
        if after and not before:
            layers.insert(0, two_phase(None, self._remove_past_block, name="out"))
        return with_middleware(self.engines[self.server_index], *layers)

    def _remove_past_block(self, turn: Turn) -> Turn:
        """Remove a block before the answer, as a middleware may do after the engine."""
        last = turn.blocks[-1].response_id
        retained = [block for block in turn.blocks if block.response_id != last]
        return turn.remove(self.rng.choice(retained).id) if retained else turn

    def disturb(self, name: str) -> None:
        """Cause a failure of the server, or switch the server or branch."""
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
                self.server_index = 1 - self.server_index
            case _:
                self._fork()

    def _fork(self) -> None:
        self.branches.append(self.turn)
        self.rng.shuffle(self.branches)

    def _check_requests(
        self, turn: Turn, since: int, known: list[KnownResponse], *, chained: bool
    ) -> None:
        exchanges = [e for e in self.server.requests[since:] if is_create_request(e)]
        self.stats.requests += len(exchanges)
        expected = expected_context(turn)
        if normalize_items(exchanges[-1].context) != expected:
            self.stats.incoherent += 1
            self.stats.report(f"seen {normalize_items(exchanges[-1].context)}\nsaid {expected}")
        for exchange in exchanges:
            self._check_reasoning(exchange.body["input"], expected)
        if chained:
            for index, exchange in enumerate(exchanges):
                best = byte_size(expected) if index else self._min_bytes(expected, known)
                self.stats.sent_bytes += byte_size(normalize_items(exchange.body["input"]))
                self.stats.best_bytes += best
                self.stats.full_bytes += byte_size(expected)

    def _check_reasoning(self, items: list[dict[str, Any]], expected: list[NormalForm]) -> None:
        """Count the reasoning in a request, and that of responses whose context was edited since."""
        for item in items:
            if item["type"] == "reasoning":
                context = self.reasoning_contexts[item["id"]]
                self.stats.reasoning += 1
                self.stats.stale_reasoning += tuple(expected[: len(context)]) != context

    def _usable_responses(self, turn: Turn) -> list[KnownResponse]:
        """Return the known responses of a Turn that the current server can still use."""
        if self.server_index in self.untrusted_servers:
            return []
        ids = [record.response_id for record in get_state(turn).anchors]
        records = [self.known_responses[each] for each in ids if each in self.known_responses]
        own = [each for each in records if each.server_index == self.server_index]
        return [each for each in own if each.usable and each.expires_at > self.clock]

    def _min_bytes(self, context: list[NormalForm], known: list[KnownResponse]) -> int:
        """Return the minimum number of bytes to send, given the known responses."""
        known_contexts = [each.context for each in known]
        lengths = [len(e) for e in known_contexts if tuple(context[: len(e)]) == e]
        return byte_size(context[max(lengths, default=0) :])

    def _record_response(self, turn: Turn, *, stored: bool) -> None:
        context = tuple(normalize_blocks(turn.blocks))
        response_id = turn.blocks[-1].response_id
        for block in turn.blocks:
            if isinstance(block, ReasoningBlock) and block.response_id == response_id:
                self.reasoning_contexts[block.item_id] = context
        if response_id and response_id not in self.known_responses:
            self.known_responses[response_id] = KnownResponse(
                self.server_index, context, stored, self.clock + MONTH - HOUR
            )

    def _record_healing(self, healed: Healed) -> None:
        """Record which responses are lost, and which server cannot be trusted to store context."""
        for lost in healed.lost:
            if lost in self.known_responses:
                self.known_responses[lost].usable = False
        if healed.reason in ("forgot", "unsupported"):
            self.untrusted_servers.add(self.server_index)


def byte_size(context: Sequence[NormalForm]) -> int:
    """Return the size of a context in bytes."""
    return sum(len(json.dumps(each)) for each in context)


def choose_actions(rng: random.Random, count: int) -> list[str]:
    """Return a script: mostly requests, with every kind of edit and failure."""
    return rng.choices(ACTIONS, WEIGHTS, k=count)
