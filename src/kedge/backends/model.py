"""An engine as a model of the server: whatever an Engine can reach, the server can serve.

The server keeps the memory; each request takes its whole effective context to the engine. Where the
provider has a memory of its own (``ResponsesEngine``), the request is chained there by content, so that
only what is new travels. A client that goes away ends the request upstream.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from kedge.backends.anchors import Anchors
from kedge.backends.asking import turn_of
from kedge.backends.failures import as_api_error
from kedge.backends.telling import Telling, counted, pieces_of
from kedge.engines import ChatCompletionsEngine, Engine, ResponsesEngine
from kedge.engines.protocol import Request, answer_text, innermost
from kedge.errors import AnswerIncomplete, KedgeError
from kedge.events import Outcome
from kedge.events.run import AnswerFinished, Healed
from kedge.planning import prefix_digest
from kedge.practice import Ask
from kedge.server.models import Closed, Piece, Prompt, Stopped
from kedge.turns import Turn, user

WINDOW = 128_000
"""How many tokens a model sees, where nobody said."""
GRACE = 30.0
"""Seconds for which the beginning of an answer is awaited before a stream is opened."""

ASKED = (
    "temperature",
    "top_p",
    "top_k",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "parallel_tool_calls",
    "tool_choice",
    "max_tool_calls",
)
"""Parameters of a request that change the answer, and go upstream."""
HINTS = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
)
"""Parameters that only a server of the Responses API is sure to know."""
SUMMARY = (
    "Summarise the conversation above for yourself, to go on from when it is gone. Keep every fact, "
    "name, number, decision, open question and wish of the user. Write plain text, briefly."
)
SUMMARY_TOKENS = 1_000
ENDINGS: Mapping[str, Literal["max_output_tokens", "content_filter"]] = {
    "max_output_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "length": "max_output_tokens",
    "model_context_window_exceeded": "max_output_tokens",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}
"""Reasons for which an answer may stop early, and what the server calls them."""


class EngineModel:
    """A model of the server that asks an engine.

    ``window`` is how many of its own tokens the model sees, and ``tokens`` how many of those one of
    ours is, for models whose tokens are smaller. ``stateless`` never chains upstream. ``params`` go
    along with every request; a request's own beat them.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        window: int = WINDOW,
        tokens: float = 1.0,
        stateless: bool = False,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.window = max(1, int(window / tokens))
        self.grace = GRACE
        self._engine = engine
        self._params = dict(params or {})
        self._remembers = isinstance(innermost(engine), ResponsesEngine)
        self._chains = self._remembers and not stateless
        self._anchors = Anchors()

    async def answer(self, prompt: Prompt) -> AsyncGenerator[Piece]:
        """Ask the engine, and tell its answer piece by piece."""
        try:
            turn = self._turn(prompt.ask, prompt.unseal)
            request = self._request(prompt, turn)
            async with aclosing(self._told(turn, request, live=prompt.live)) as pieces:
                async for piece in pieces:
                    yield piece
        except KedgeError as error:
            raise as_api_error(error) from error

    async def summarise(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Have the model sum up items that a compaction leaves out; empty if it cannot."""
        try:
            turn = turn_of(Ask(items=items), _sealed, self._scope).append(user(SUMMARY))
            params = {**self._params, "max_output_tokens": SUMMARY_TOKENS}
            finished = await self._engine.run(turn, mode="stateless", **params)
        except KedgeError as error:
            as_api_error(error)  # which says so in the log
            return ""
        return answer_text(finished)

    async def aclose(self) -> None:
        """Close the connections upstream."""
        await self._engine.aclose()

    @property
    def _scope(self) -> str:
        return str(getattr(innermost(self._engine), "scope", ""))

    def _turn(self, ask: Ask, unseal: Any) -> Turn:
        return turn_of(ask, unseal, self._scope)

    def _request(self, prompt: Prompt, turn: Turn) -> Request:
        return Request(
            mode="chained" if self._chains else "stateless",
            tools=tuple(prompt.ask.tools),
            params={**self._params, **self._asked(prompt)},
            candidates=self._anchors.candidates(turn) if self._chains else (),
            streaming=prompt.live,
        )

    def _asked(self, prompt: Prompt) -> dict[str, Any]:
        """The parameters that go upstream, in the names of the Responses API."""
        body = prompt.body
        names = (*ASKED, *HINTS) if self._remembers else ASKED
        asked = {name: body[name] for name in names if body.get(name) is not None}
        if not prompt.ask.tools:
            asked.pop("tool_choice", None)
            asked.pop("parallel_tool_calls", None)
        if prompt.most is not None:
            asked["max_output_tokens"] = prompt.most
        if (text := _given(body, "text")) and text != {"format": {"type": "text"}}:
            asked["text"] = text
        reasoning = _given(body, "reasoning")
        if isinstance(innermost(self._engine), ChatCompletionsEngine):
            reasoning.pop("summary", None)  # it has none; the server shows what it is told
        return asked | ({"reasoning": reasoning} if reasoning else {})

    async def _told(self, turn: Turn, request: Request, *, live: bool) -> AsyncGenerator[Piece]:
        telling = Telling(prefix_digest(turn))
        try:
            async with aclosing(self._engine.events(turn, request)) as events:
                async for event in events:
                    if isinstance(event, Healed):
                        telling = Telling(telling.before)  # nothing was shown yet
                    elif isinstance(event, AnswerFinished):
                        self._anchors.note(event.turn)
                        for piece in _ended(telling, event.outcome, live=live):
                            yield piece
                    elif live:
                        for piece in telling.feed(event):
                            yield piece
                    else:
                        telling.assembler.feed(event)
        except AnswerIncomplete as error:
            reason = ENDINGS.get(error.code)
            if reason is None:
                raise
            for piece in _cut_short(telling, error, live=live):
                yield piece
            yield Stopped(reason)


def _given(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The members of a parameter that are set."""
    members: Mapping[str, Any] = body.get(name) or {}
    return {name: value for name, value in members.items() if value is not None}


def _sealed(_: str) -> None:
    return None


def _ended(telling: Telling, outcome: Outcome, *, live: bool) -> list[Piece]:
    if live:
        return list(telling.finish(outcome))
    pieces = [piece for block in outcome.blocks for piece in pieces_of(block, telling.before)]
    return [*pieces, *([counted(outcome.usage)] if outcome.usage else [])]


def _cut_short(telling: Telling, error: AnswerIncomplete, *, live: bool) -> list[Piece]:
    """Tell what there is of an answer that stopped early; its last item stays open."""
    usage = telling.assembler.finish().usage
    pieces = _ended(telling, Outcome("incomplete", error.partial, usage=usage), live=live)
    last = max((at for at, piece in enumerate(pieces) if isinstance(piece, Closed)), default=-1)
    return [piece for at, piece in enumerate(pieces) if at != last]
