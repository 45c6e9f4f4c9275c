"""Runs random scripts in stored conversations, and compares everything that Kedge says about each request.

The second law: every request on the wire has one record, and everything that Kedge says about the request comes from
it. After every run, the requests that the servers received are compared with the stored rows, the events and the reply
of the run, its spans, its log records and the growth of the metrics, with ``kedge inspect``, ``tree`` and ``stats``,
and with the API of the page. A dry run before each message must agree with the first request, unless it is conditional.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from openai import AsyncOpenAI

from kedge import Conversation, connect
from kedge.cli.inspect import inspect_conversation
from kedge.compaction import MessageLimitCompactor
from kedge.engines import Engine, ResponsesEngine, unwrap
from kedge.errors import EngineError
from kedge.events import Event, ResponseStarted, TextDelta
from kedge.events.run import ToolStarted
from kedge.planning import RequestPlan
from kedge.testing import TestServer
from law import stored_conversations
from law.record_views import RecordStats, RequestViews, RunResult
from law.stored_conversations import MAX_MESSAGES, PROMPTS, StoredConversations, alpha, beta

LONG_PROMPTS = (*PROMPTS, "Line {n} " + "with a longer tail of words " * 20)
DISTURBANCES = (
    "status=500",
    "status=429",
    "cut_after_events=1",
    "cut_after_events=5",
    "forget_all",
    "forget_silently",
    "forget_silently,echo=no",
    "fail_after_events=2",
)
WEIGHTED_ENGINES = {
    "responses": 6,
    "chat": 1,
    "object": 2,
    "stateless": 1,
    "websocket": 2,
    "anthropic": 1,
    "sdk": 2,
}
"""The kinds of engines, each with its weight."""
SETTINGS: dict[str, dict[str, Any]] = {
    "object": {"mode": "conversation"},
    "stateless": {"mode": "stateless"},
    "websocket": {"transport": "websocket"},
}
"""The settings of engines that a model string does not tell."""


@dataclass
class RecordFuzzer(StoredConversations):
    """Two servers, a store, the conversations in it, and all views of their requests."""

    keep_bodies: bool = True
    kinds: Sequence[str] = tuple(WEIGHTED_ENGINES)
    """The kinds of engines that are used."""
    stats: RecordStats = field(default_factory=RecordStats)
    servers: list[TestServer] = field(default_factory=list[TestServer])
    models: dict[str, str] = field(default_factory=dict[str, str])
    """The model strings of conversations that were opened and not used yet.

    ``kedge inspect`` plans for these as the engine does: later, an engine does not read the evidence that others store.
    """
    is_late: bool = False
    """Whether the clock was advanced, which commands do not know."""
    views: RequestViews = field(init=False)

    async def __aenter__(self) -> Self:
        self.servers = [
            await self.stack.enter_async_context(self.network.open_server()) for _ in range(2)
        ]
        if self.rng.random() < 0.5:
            self.servers[1].faults.set("anonymous")
        self.store = await self._open_store(self.servers[0])
        self.views = self.stack.enter_context(RequestViews(self.store, self.servers, self.stats))
        settings = {"tools": [alpha, beta], "middleware": [self.views.trace]}
        engine, model = self._build_engine(self.servers[0])
        self.conversations.append(await Conversation.create(engine, store=self.store, **settings))
        self.models[self.conversation.id] = model
        return self

    def _build_engine(self, server: TestServer | None = None) -> tuple[Engine, str]:
        """Return an engine for one of the servers, and its model string if that tells everything."""
        weights = [WEIGHTED_ENGINES[kind] for kind in self.kinds]
        kind = self.rng.choices(self.kinds, weights)[0]
        server = server or self.servers[self.rng.random() < 0.3]
        options: dict[str, Any] = {"clock": self.servers[0].clock, **SETTINGS.get(kind, {})}
        provider = "chat" if kind == "chat" else "responses"
        model = f"{provider}:{server.base_url}#practice"
        match kind:
            case "sdk":
                engine: Engine = ResponsesEngine(
                    "practice",
                    make_client=lambda: AsyncOpenAI(
                        base_url=server.base_url, api_key="any", max_retries=0
                    ),
                    scope=f"sdk at {server.base_url}",
                    **options,
                )
            case "anthropic":
                root = server.base_url.removesuffix("/v1")
                engine = connect(
                    "anthropic:practice", base_url=root, api_key="any", max_retries=0, **options
                )
            case _:
                engine = connect(model, max_retries=0, **options)
        self.stack.push_async_callback(engine.aclose)
        is_told = kind in ("responses", "chat")
        return engine, model if is_told else ""

    async def _run(
        self,
        stream: Any,
        plan: RequestPlan | None = None,
        inspection: dict[str, Any] | None = None,
        *,
        leave: type[Event] | None = None,
    ) -> None:
        """Consume a stream, and compare all views of its requests."""
        self.models.pop(self.conversation.id, None)
        self.views.start()
        events: list[Event] = []
        error: EngineError | None = None
        try:
            async with stream:
                async for event in stream:
                    events.append(event)
                    if leave and isinstance(event, leave):
                        break
        except EngineError as raised:
            error = raised
        reply = None if leave or error else stream.reply
        result = RunResult(self.conversation, events, reply, error, plan, inspection)
        await self.views.compare(result)

    async def _send(
        self, text: str = "", *, leave: type[Event] | None = None, **options: Any
    ) -> None:
        text = text or self._next_prompt(LONG_PROMPTS)
        streaming = leave is not None or self.rng.random() < 0.5
        plan = self.conversation.plan(text, streaming=streaming, **options)
        is_default = streaming and not options
        inspection = await self._inspect(text) if is_default else None  # it plans a stream
        stream = self.conversation.stream(text, streaming=streaming, **options)
        await self._run(stream, plan, inspection, leave=leave)

    async def _inspect(self, text: str) -> dict[str, Any] | None:
        """Return the plan of the next request that ``kedge inspect --json`` shows."""
        model = self.models.get(self.conversation.id)
        if not model:
            return None
        store, head = self.conversation.store, self.conversation.head
        row = await store.conversation(self.conversation.id)
        found = await inspect_conversation(store, row, head, model, text)
        return found.to_json()["plan"]

    async def do_send(self) -> None:
        """Send a message, streamed or not."""
        await self._send()

    async def do_disturb(self) -> None:
        """Send a message to a server that fails or forgets once."""
        fault = self.rng.choice(DISTURBANCES)
        for server in self.servers:
            server.faults.set(fault, times=1)
        await self._send()
        for server in self.servers:
            server.faults.clear()

    async def do_leave(self) -> None:
        """Stop an answer at its first text."""
        await self._send("Write 60 words.", leave=TextDelta)

    async def do_background(self) -> None:
        """Send a message in the background, and wait for its answer, stop waiting, or leave it for later."""
        if isinstance(unwrap(self.conversation.engine), ResponsesEngine):
            leave = self.rng.choice((None, TextDelta, ResponseStarted))
            await self._send("Write 30 words.", leave=leave, background=True)
            if self.rng.random() < 0.3:
                await self.do_reopen()
            if self.rng.random() < 0.7:
                await self.do_resume()

    async def do_wait(self) -> None:
        """Send a message in the background, and wait for its answer in another run."""
        if isinstance(unwrap(self.conversation.engine), ResponsesEngine):
            options: Any = {"background": True, "streaming": False}
            await self._run(self.conversation.stream("Write 30 words.", **options))
            await self.do_resume()

    async def do_lose(self) -> None:
        """Send a message twice, after the servers have lost everything in between."""
        await self._send()
        for server in self.servers:
            server.forget()
        await self._send()

    async def do_leave_tool(self) -> None:
        """Stop a run while its tools run."""
        await self._send("Please call alpha and call beta.", leave=ToolStarted)

    async def do_fork(self) -> None:
        """Fork from a node."""
        nodes = await self.store.tree(self.conversation.row)
        at = self.rng.choice((None, self.rng.choice(nodes).id))
        forked = await self.conversation.fork(at)
        self.conversations.append(forked)

    async def do_reopen(self) -> None:
        """Open the conversation with another store object and engine, as another process would."""
        limited = self.rng.random() < 0.3
        engine, model = self._build_engine()
        self.models[self.conversation.id] = "" if self.is_late else model
        self.conversations[-1] = await Conversation.open(
            engine,
            store=await self._open_store(self.servers[0]),
            id=self.conversation.id,
            tools=[alpha, beta],
            middleware=[self.views.trace],
            compactor=MessageLimitCompactor(MAX_MESSAGES) if limited else None,
        )

    async def do_regenerate(self) -> None:
        """Regenerate the last answer."""
        await self._run(self.conversation.stream_regenerate())

    async def do_resume(self) -> None:
        """Resume a pending question."""
        await self._run(self.conversation.stream_resume())

    async def do_forget(self) -> None:
        """Delete all responses of a server."""
        self.rng.choice(self.servers).forget()

    async def do_expire(self) -> None:
        """Advance the clocks by a month, and delete expired responses."""
        self.is_late = True
        self.models.clear()
        for server in self.servers:
            server.clock.advance(days=31)
            server.purge()


ACTIONS = stored_conversations.list_actions(RecordFuzzer)
FREQUENT = dict.fromkeys(("background", "disturb", "edit", "reopen", "resume"), 3) | {"send": 10}
WEIGHTS = [FREQUENT.get(name, 1) for name in ACTIONS]


def choose_actions(rng: random.Random, count: int) -> list[str]:
    """Return every action once, each between two messages, and random ones after them.

    The first two are those whose effect depends on the server, which is then one that can be chained on.
    """
    every = [name for name in ACTIONS if name not in ("send", "lose", "wait")]
    rng.shuffle(every)
    certain = [each for name in ("lose", "wait", *every) for each in ("send", name)]
    return [*certain, "send", *rng.choices(ACTIONS, WEIGHTS, k=count), "send"]
