"""Runs branches of a conversation in conversation objects, in several processes at once, and checks every answer.

Each round has four engines: two of one process and one of another with the same store, and one of a process without
it. Branches of a conversation are continued by any of them, one after the other and at once. Streams are left early,
items are inserted and deleted through the API, and the server forgets. In some rounds the engines audit every request
(``audit_every=1``); then items of any length are deleted. An answer from another context than its Turn must be
reported, and no tool may run twice for one question.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
from openai import AsyncOpenAI, OpenAIError

from kedge.engines import ResponsesEngine
from kedge.errors import EngineError
from kedge.events import Event, TextDelta
from kedge.events.run import ServerForgot
from kedge.evidence.object_claims import ObjectClaims
from kedge.planning import get_state
from kedge.providers import connect
from kedge.store import open_store
from kedge.turns import Turn, user
from law.networks import Network, SocketNetwork
from law.turn_edits import answer_open_calls
from normalization import expected_context, normalize_items

FILLER = "the rivers of the north and the mountains of the south " * 6
"""The words of a message, which are long enough for a token count to show that it was deleted."""
MAX_UNCACHED = 12
"""The number of items of an object that has fewer tokens than a server caches."""
ACTIONS = ("ask", "ask", "ask", "call", "fork", "fork", "leave", "insert", "delete", "forget")
FORGETTING = ("forget_silently", "forget_silently,echo=missing")


@dataclass(slots=True)
class ObjectStats:
    """The results of a campaign."""

    answers: int = 0
    wrong: int = 0
    """Answers that were generated from another context than their Turn."""
    flagged: int = 0
    """The number of wrong answers that were reported."""
    repeated: int = 0
    """Tool runs after the first one for the same question."""
    first_wrong: str = ""
    """The first wrong answer that was not reported."""

    @property
    def unreported(self) -> int:
        """The number of wrong answers that were not reported."""
        return self.wrong - self.flagged


@dataclass
class ObjectFuzzer:
    """One round: a server, a store, four engines, and branches of a conversation."""

    rng: random.Random
    stats: ObjectStats = field(default_factory=ObjectStats)
    branches: list[Turn] = field(default_factory=lambda: [Turn()])
    runs: Counter[int] = field(default_factory=Counter[int])
    has_tools: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether the request of each response offered tools."""
    asked: int = 0
    clock: float = 1_000_000.0
    network: Network = field(default_factory=SocketNetwork)

    async def run(self, count: int) -> ObjectStats:
        """Take random actions."""
        async with AsyncExitStack() as stack:
            self.server = await stack.enter_async_context(self.network.open_server())
            self.is_unknown = self.rng.random() < 0.5
            self.is_audited = self.rng.random() < 0.3
            self._reset_faults()
            store = await stack.enter_async_context(await open_store("sqlite://:memory:"))
            shared = ObjectClaims()
            self.engines = [self._open_engine() for _ in range(4)]
            for number, engine in enumerate(self.engines):
                stack.push_async_callback(engine.aclose)
                engine.objects.claims = shared if number < 2 else ObjectClaims()
                if number < 3:
                    await engine.attach_evidence(store)
            for _ in range(count):
                await self._act(self.rng.choice(ACTIONS))
        self.stats.repeated += sum(self.runs.values()) - len(self.runs)
        return self.stats

    def _open_engine(self) -> ResponsesEngine:
        engine = connect(
            f"responses:{self.server.base_url}#practice",
            mode="conversation",
            max_retries=0,
            timeout=300,
            clock=self._read_clock,
            audit_every=int(self.is_audited),
        )
        assert isinstance(engine, ResponsesEngine)
        return engine

    def _reset_faults(self) -> None:
        self.server.faults.clear()
        if self.is_unknown:
            self.server.faults.set("anonymous")

    def _read_clock(self) -> float:
        self.clock += 0.001
        return self.clock

    async def _act(self, action: str) -> None:
        self.clock += self.rng.choice((1, 20, 70))
        index = self.rng.randrange(len(self.branches))
        match action:
            case "fork":
                await self._fork(self.branches[index])
            case "leave":
                await self._leave(self.branches[index])
            case "insert" | "delete":
                await self._change_object(self.branches[index], action)
            case _:
                calls = action == "call"
                if action == "forget":
                    self.server.faults.set(self.rng.choice(FORGETTING), times=1)
                    calls = self._choose_tools(self.branches[index])
                self.branches[index] = await self._ask(self.branches[index], calls=calls)
                self._reset_faults()

    def _choose_tools(self, turn: Turn) -> bool:
        """Return whether the request to a forgetting server offers tools.

        A known server is offered the same tools as before. After a change of the tools the token count cannot be
        compared, so there is no evidence of a loss; a known server is then trusted, and others are sent everything.
        """
        if self.is_unknown or not turn.blocks:
            return self.rng.random() < 0.3
        answered = [each.response_id for each in turn.blocks if each.response_id in self.has_tools]
        return bool(answered) and self.has_tools[answered[-1]]

    def _make_question(self, turn: Turn, *, calls: bool = False) -> Turn:
        self.asked += 1
        text = f"call add with a={self.asked} and b=1" if calls else f"Line {self.asked}: {FILLER}"
        return answer_open_calls(turn).append(user(text))

    async def _fork(self, turn: Turn) -> None:
        """Continue a branch several times at once; at most four branches are retained."""
        forks: list[Turn] = []

        async def ask() -> None:
            forks.append(await self._ask(turn))

        async with anyio.create_task_group() as group:
            for _ in range(self.rng.randint(2, 3)):
                group.start_soon(ask)
        self.branches = [*self.branches, *forks][-4:]

    async def _leave(self, turn: Turn) -> None:
        engine = self.rng.choice(self.engines)
        async with engine.stream(self._make_question(turn)) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break

    async def _change_object(self, turn: Turn, action: str) -> None:
        """Insert or delete an item as another client."""
        object_id = get_state(turn).conversation_id
        if not object_id:
            return
        async with AsyncOpenAI(base_url=self.server.base_url, api_key="any") as client:
            items: Any = client.conversations.items
            try:
                if action == "insert":
                    item = {"type": "message", "role": "user", "content": f"Intruder: {FILLER}"}
                    await items.create(object_id, items=[item])
                    return
                listed = [item async for item in items.list(object_id)]
                item = self.rng.choice(
                    [each for each in listed if self._can_miss(each, len(listed))]
                )
                await items.delete(item.id, conversation_id=object_id)
            except (OpenAIError, IndexError):
                return  # locked, or without messages

    def _can_miss(self, item: object, count: int) -> bool:
        """Return whether the loss of an item of an object leaves evidence.

        The token count is the only evidence about items before the end of the object, which alone is listed after an
        answer. A loss within its tolerance is found by an audit only. The tolerance for an unknown server contains the
        growth of the cached tokens, which begins at 1,024 tokens.
        """
        is_counted = FILLER in str(item) and (count <= MAX_UNCACHED or not self.is_unknown)
        return self.is_audited or is_counted

    async def _ask(self, turn: Turn, *, calls: bool = False) -> Turn:
        turn, number = self._make_question(turn, calls=calls), self.asked
        engine, streaming = self.rng.choice(self.engines), self.rng.random() < 0.6
        events: list[Event] = []

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.runs[a] += 1
            return a + b

        options: dict[str, Any] = {"tools": [add]} if calls else {}
        try:
            async with engine.stream(turn, streaming=streaming, **options) as stream:
                async for event in stream:
                    events.append(event)  # noqa: PERF401 - after an error, the earlier events are needed
        except EngineError as error:
            return error.turn or turn
        if response_id := stream.turn.blocks[-1].response_id:
            self.has_tools[response_id] = calls
        self._check(stream.turn, events, f"message {number}, streaming {streaming}")
        return stream.turn

    def _check(self, turn: Turn, events: Sequence[Event], description: str) -> None:
        self.stats.answers += 1
        response_id = turn.blocks[-1].response_id
        found = [each for each in self.server.requests if each.response_id == response_id]
        read = normalize_items(found[-1].context) if found else None
        if read != expected_context(turn):
            self.stats.wrong += 1
            if any(isinstance(event, ServerForgot) for event in events):
                self.stats.flagged += 1
            else:
                self.stats.first_wrong = self.stats.first_wrong or f"{description}: read {read}"
