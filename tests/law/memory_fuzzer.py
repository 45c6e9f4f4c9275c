"""Runs conversations with servers whose memory misbehaves, and checks the context of every answer.

Each round has a server of an unknown kind with one behavior, alone or mixed with another, and messages of
random length. A server that never stores responses must cause no wrong answer. One that starts to forget may
cause one wrong answer that was being streamed, which must be flagged.
"""

import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kedge.engines import Engine
from kedge.errors import EngineError
from kedge.events.run import Healed, ServerForgot
from kedge.evidence.server_evidence import Trust
from kedge.planning import Mode
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import Turn, image, user
from law.networks import Network, SocketNetwork
from law.turn_edits import EDITS, answer_open_calls
from normalization import expected_context, normalize_items

if TYPE_CHECKING:
    from kedge.events import Event

BEHAVIORS: Mapping[str, tuple[str, ...]] = {
    "honest": (),
    "stores nothing": ("forget_silently",),
    "stores nothing, null echo": ("forget_silently,echo=no",),
    "stores nothing, late null echo": ("forget_silently,echo=late",),
    "stores nothing, no echo": ("forget_silently,echo=missing",),
    "rejects what it stored": ("forget_all", "not_found=vllm"),
    "says that it stored nothing": ("report_unstored", "forget_all", "not_found=ogx"),
    "caps the chain": ("remember=6",),
    "caps the chain early": ("remember=2",),
    "reuses ids": ("reuse_response_id",),
    "counts cached tokens apart": ("report_usage=uncached",),
    "counts nothing": ("report_usage=none",),
    "counts a constant": ("report_usage=constant",),
    "counts nothing and forgets": ("report_usage=none", "forget_silently"),
    "counts a constant and forgets": ("report_usage=constant", "forget_silently"),
    "counts only new tokens": ("report_usage=new",),
    "counts only new tokens and forgets": ("report_usage=new", "forget_silently"),
    "lists nothing and forgets": ("hide_stored", "forget_silently"),
    "completes another text": ("change_completed=text",),
    "completes fewer items": ("change_completed=missing",),
    "omits indices": ("omit_output_index",),
    "omits the content type": ("stream_content_type=none",),
    "omits response ids": ("omit_response_id",),
    "breaks surrogates": ("lone_surrogate",),
    "rejects chaining": ("refuse_previous_response_id=llama.cpp",),
}
"""Behaviors of a server from its first request, as fault specifications."""
LATE_BEHAVIORS = ("forget_silently", "forget_silently,echo=no", "remember=0", "remember=1")
"""Behaviors that a server may start in the middle of a conversation."""
TRANSPORTS: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "stream": {},
    "websocket": {"transport": "websocket"},
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
THOUGHT = "Think about {n}. "
"""The start of a message that the practice model answers after reasoning."""
CONTENTS = ("", "reasoning", "image")
"""What a conversation contains besides text."""
MESSAGES = (
    "Line {n}",
    "What did I say first?",
    "Please write about the rivers of the north, message {n}.",
    "Line {n} " + "with a longer tail of words " * 12,
    "hi",
)


@dataclass(slots=True)
class MemoryStats:
    """The results of a campaign."""

    requests: int = 0
    chained: int = 0
    answers: int = 0
    wrong: int = 0
    """Answers shown that were generated from a context other than the Turn."""
    flagged: int = 0
    """The number of wrong answers that were reported."""
    healed: int = 0
    unreported: int = 0
    """Wrong answers that were not reported, although the server's token count shows them."""
    contradicted: int = 0
    """Requests that a dry run planned in another way, without saying that its plan is conditional."""
    first_wrong: str = ""


def is_visible_loss(behavior: str, read: object, expected: object) -> bool:
    """Return whether the count of a server shows a loss: half of the context is missing from an honest count."""
    is_honest = "report_usage" not in str(BEHAVIORS[behavior])
    return is_honest and 2 * len(str(read)) < len(str(expected)) and len(str(expected)) > 2_000


@dataclass
class MemoryFuzzer:
    """One round: a server with a behavior, and one conversation."""

    rng: random.Random
    behavior: str
    transport: str
    stats: MemoryStats = field(default_factory=MemoryStats)
    trust: Trust = "earned"
    content: str = ""
    mode: Mode = "chained"
    clock: float = 1_000_000.0
    turn: Turn = field(default_factory=Turn)
    network: Network = field(default_factory=SocketNetwork)
    _instructions: str | None = None
    """The instructions of the last request."""

    async def run(self, count: int, *, late: str = "", edits: bool = False) -> MemoryStats:
        """Send messages; from the middle on, the server also has the behavior ``late``."""
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(self.network.open_server())
            for fault in ("anonymous", *BEHAVIORS[self.behavior]):
                server.faults.set(fault)
            include = ["reasoning.encrypted_content"] if self.content == "reasoning" else []
            engine = connect(
                f"responses:{server.base_url}#practice",
                max_retries=0,
                clock=self._read_clock,
                trust=self.trust,
                mode=self.mode,
                params={"include": include} if include else {},
                **TRANSPORTS[self.transport],
            )
            stack.push_async_callback(engine.aclose)
            for number in range(count):
                if late and number == count // 2:
                    server.faults.set(late)
                if edits and self.rng.random() < 0.2:
                    self.turn = EDITS[self.rng.choice(list(EDITS))](self.turn, self.rng)
                await self._send(server, engine, number)
        return self.stats

    def _read_clock(self) -> float:
        self.clock += 0.001
        return self.clock

    async def _send(self, server: TestServer, engine: Engine, number: int) -> None:
        self.clock += self.rng.choice((1, 20, 70))
        text = self.rng.choice(MESSAGES).format(n=number)
        if self.content == "reasoning":
            text = THOUGHT.format(n=number) + text
        parts: list[Any] = [text]
        if self.content == "image" and number < 2:
            parts.append(image(PICTURE))
        since = len(server.requests)
        events: list[Event] = []
        turn = answer_open_calls(self.turn).append(user(parts))
        streaming = self.transport != "whole"
        plan = engine.plan(turn, streaming=streaming)
        try:
            async with engine.stream(turn, streaming=streaming) as stream:
                async for event in stream:
                    events.append(event)  # noqa: PERF401 - after an error, the earlier events are needed
        except EngineError as error:
            self.turn = error.turn or turn
            return
        self.turn = stream.turn
        posted = [each for each in server.requests[since:] if each.method == "POST"]
        self.stats.requests += len(posted)
        self.stats.chained += sum("previous_response_id" in each.body for each in posted)
        self.stats.healed += sum(isinstance(event, Healed) for event in events)
        self.stats.answers += 1
        sent = posted[0].body.get("previous_response_id", "") if posted else ""
        self.stats.contradicted += not plan.conditional and plan.previous_response_id != sent
        instructions = posted[-1].body.get("instructions")
        # The counts before and after a change of the instructions cannot be compared.
        is_changed, self._instructions = instructions != self._instructions, instructions
        read, expected = normalize_items(posted[-1].context), expected_context(stream.turn)
        if read != expected:
            self.stats.wrong += 1
            is_flagged = any(isinstance(event, ServerForgot) for event in events)
            self.stats.flagged += is_flagged
            is_visible = is_visible_loss(self.behavior, read, expected) and not is_changed
            self.stats.unreported += is_visible and not is_flagged
            found = f"{self.behavior}, {self.transport}, message {number}: read {read}"
            self.stats.first_wrong = self.stats.first_wrong or found
