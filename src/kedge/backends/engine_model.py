"""An engine as a model of the server: whatever an Engine can reach, the server can serve.

The server keeps the memory; each request takes its whole effective context to the engine. Where the
provider has a memory of its own (``ResponsesEngine``), the request is chained there by content, so that
only what is new travels. A client that goes away ends the request upstream.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from kedge.backends.errors import to_api_error
from kedge.backends.events_to_items import OutputEmitter, convert_usage, emit_block
from kedge.backends.items_to_turn import build_turn
from kedge.engines import AnthropicEngine, ChatCompletionsEngine, Engine, ResponsesEngine
from kedge.engines.base import Request, answer_text, unwrap
from kedge.errors import AnswerIncomplete, KedgeError, UnsupportedParameter
from kedge.events import Outcome
from kedge.events.run import AnswerFinished, Healed
from kedge.planning import AnchorRecord, covered_count, get_state, prefix_digest
from kedge.planning.digests import get_prefix_index
from kedge.practice import PracticeRequest
from kedge.server.models import ItemClosed, OutputEvent, OutputTruncated, Prompt
from kedge.turns import Turn, user

MAX_ANCHORS = 10_000
MAX_PREFIXES = 64
"""How many of the newest prefixes of a Turn are looked up."""


class AnchorCache:
    """Records of one scope by digest, the least recently used ones dropped."""

    def __init__(self, max_size: int = MAX_ANCHORS) -> None:
        self._max_size = max_size
        self._records: OrderedDict[str, AnchorRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def record(self, turn: Turn) -> None:
        """Note what became of a Turn: its newest response, and which ones are lost."""
        for record in get_state(turn).anchors:
            if record.status == "lost":
                self._records.pop(record.digest, None)
            elif record.stored:
                self._records[record.digest] = record
                self._records.move_to_end(record.digest)
        while len(self._records) > self._max_size:
            self._records.popitem(last=False)

    def find_candidates(self, turn: Turn) -> tuple[AnchorRecord, ...]:
        """The noted responses that hold a beginning of this Turn, the longest first."""
        ledger, covered = get_prefix_index(turn), covered_count(turn)
        digests = (
            ledger.digest(count) for count in range(covered, max(covered - MAX_PREFIXES, 0), -1)
        )
        return tuple(self._records[digest] for digest in digests if digest in self._records)


DEFAULT_WINDOW = 128_000
"""How many tokens a model sees, where nobody said."""
DEFAULT_GRACE = 30.0
"""Seconds for which the beginning of an answer is awaited before a stream is opened."""

FORWARDED_PARAMS = (
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
ACCOUNT_PARAMS: Mapping[type[Engine], tuple[str, ...]] = {
    ResponsesEngine: (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    ),
    ChatCompletionsEngine: (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    ),
    AnthropicEngine: ("user", "safety_identifier", "service_tier"),
}
"""Parameters about the account and the cache, for each API that accepts them."""
ANTHROPIC_TIERS: Mapping[str, str] = {"auto": "auto", "default": "standard_only"}
SUMMARY_PROMPT = (
    "Summarise the conversation above for yourself, to go on from when it is gone. Keep every fact, "
    "name, number, decision, open question and wish of the user. Write plain text, briefly."
)
MAX_SUMMARY_TOKENS = 1_000
INCOMPLETE_REASONS: Mapping[str, Literal["max_output_tokens", "content_filter"]] = {
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
        window: int = DEFAULT_WINDOW,
        tokens: float = 1.0,
        stateless: bool = False,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.window = max(1, int(window / tokens))
        self.grace = DEFAULT_GRACE
        self._engine = engine
        self._params = dict(params or {})
        inner = unwrap(engine)
        self._can_chain = isinstance(inner, ResponsesEngine) and not stateless
        self._account_params = next(
            (names for api, names in ACCOUNT_PARAMS.items() if isinstance(inner, api)), ()
        )
        self._anchors = AnchorCache()

    async def answer(self, prompt: Prompt) -> AsyncGenerator[OutputEvent]:
        """Ask the engine, and tell its answer piece by piece."""
        try:
            turn = self._build_turn(prompt.ask, prompt.decrypt_reasoning)
            request = self._build_request(prompt, turn)
            async with aclosing(self._stream_output(turn, request, live=prompt.stream)) as pieces:
                async for piece in pieces:
                    yield piece
        except KedgeError as error:
            raise to_api_error(error) from error

    async def summarise(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Have the model sum up items that a compaction leaves out; empty if it cannot."""
        try:
            turn = build_turn(PracticeRequest(items=items), _unseal_nothing, self._scope).append(
                user(SUMMARY_PROMPT)
            )
            params = {**self._params, "max_output_tokens": MAX_SUMMARY_TOKENS}
            finished = await self._engine.run(turn, mode="stateless", **params)
        except KedgeError as error:
            to_api_error(error)  # which says so in the log
            return ""
        return answer_text(finished)

    async def aclose(self) -> None:
        """Close the connections upstream."""
        await self._engine.aclose()

    @property
    def _scope(self) -> str:
        return str(getattr(unwrap(self._engine), "scope", ""))

    def _build_turn(self, ask: PracticeRequest, decrypt_reasoning: Any) -> Turn:
        return build_turn(ask, decrypt_reasoning, self._scope)

    def _build_request(self, prompt: Prompt, turn: Turn) -> Request:
        return Request(
            mode="chained" if self._can_chain else "stateless",
            tools=tuple(prompt.ask.tools),
            params={**self._params, **self._build_params(prompt)},
            candidates=self._anchors.find_candidates(turn) if self._can_chain else (),
            streaming=prompt.stream,
        )

    def _build_params(self, prompt: Prompt) -> dict[str, Any]:
        """The parameters that go upstream, in the names of the Responses API."""
        body = prompt.body
        engine = unwrap(self._engine)
        names = (*FORWARDED_PARAMS, *self._account_params)
        asked = {name: body[name] for name in names if body.get(name) is not None}
        if "service_tier" in asked and isinstance(engine, AnthropicEngine):
            asked["service_tier"] = _map_anthropic_tier(asked["service_tier"])
        if not prompt.ask.tools:
            asked.pop("tool_choice", None)
            asked.pop("parallel_tool_calls", None)
        if prompt.max_tokens is not None:
            asked["max_output_tokens"] = prompt.max_tokens
        if (text := _drop_nulls(body, "text")) and text != {"format": {"type": "text"}}:
            asked["text"] = text
        reasoning = _drop_nulls(body, "reasoning")
        if isinstance(engine, ChatCompletionsEngine):
            reasoning.pop("summary", None)  # it has none; the server shows what it is told
        return asked | ({"reasoning": reasoning} if reasoning else {})

    async def _stream_output(
        self, turn: Turn, request: Request, *, live: bool
    ) -> AsyncGenerator[OutputEvent]:
        telling = OutputEmitter(prefix_digest(turn))
        try:
            async with aclosing(self._engine.events(turn, request)) as events:
                async for event in events:
                    if isinstance(event, Healed):
                        telling = OutputEmitter(telling.prefix_digest)  # nothing was shown yet
                    elif isinstance(event, AnswerFinished):
                        self._anchors.record(event.turn)
                        for piece in _finish_output(telling, event.outcome, live=live):
                            yield piece
                    elif live:
                        for piece in telling.feed(event):
                            yield piece
                    else:
                        telling.assembler.feed(event)
        except AnswerIncomplete as error:
            reason = INCOMPLETE_REASONS.get(error.code)
            if reason is None:
                raise
            for piece in _finish_incomplete(telling, error, live=live):
                yield piece
            yield OutputTruncated(reason)


def _drop_nulls(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The members of a parameter that are set."""
    members: Mapping[str, Any] = body.get(name) or {}
    return {name: value for name, value in members.items() if value is not None}


def _map_anthropic_tier(tier: str) -> str:
    if tier not in ANTHROPIC_TIERS:
        raise UnsupportedParameter("service_tier", "use auto or default")
    return ANTHROPIC_TIERS[tier]


def _unseal_nothing(_: str) -> None:
    return None


def _finish_output(emitter: OutputEmitter, outcome: Outcome, *, live: bool) -> list[OutputEvent]:
    if live:
        return list(emitter.finish(outcome))
    pieces = [
        piece for block in outcome.blocks for piece in emit_block(block, emitter.prefix_digest)
    ]
    return [*pieces, *([convert_usage(outcome.usage)] if outcome.usage else [])]


def _finish_incomplete(
    emitter: OutputEmitter, error: AnswerIncomplete, *, live: bool
) -> list[OutputEvent]:
    """Tell what there is of an answer that stopped early; its last item stays open."""
    usage = emitter.assembler.finish().usage
    pieces = _finish_output(emitter, Outcome("incomplete", error.partial, usage=usage), live=live)
    last = max((at for at, piece in enumerate(pieces) if isinstance(piece, ItemClosed)), default=-1)
    return [piece for at, piece in enumerate(pieces) if at != last]
