"""Serve an engine as a model of the server.

The server stores conversations; each request passes its full effective context to the engine. If the
provider stores responses (``ResponsesEngine``), the request is chained there by content, so that only
new items are sent. If a client disconnects, the upstream request is cancelled.

A client can correct its request or try again later; it cannot set a key, an address or a model name
upstream. A failure caused by the request is therefore a 4xx with the provider's reason, and every other
failure is a 5xx of "the model behind this server", with a remedy for its operator. The log has the
provider's reason of every failure except a rejected key.
"""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any, Literal

from kedge import errors
from kedge._internal.arguments import check_positive_int, check_type
from kedge._internal.responsive import MANY_ITEMS, compute
from kedge.engines import (
    AnthropicEngine,
    ChatCompletionsEngine,
    Engine,
    ResponsesEngine,
    find_filters,
)
from kedge.engines.base import Request, unwrap
from kedge.engines.params import LOGPROBS
from kedge.engines.reply import answer_text
from kedge.errors import EngineError, KedgeError
from kedge.events import Outcome
from kedge.events.run import AnswerFinished, Healed
from kedge.planning import AnchorRecord, get_state, prefix_digest
from kedge.planning.anchor_index import (
    IndexedResponse,
    MemoryAnchorIndex,
    iter_candidates,
    iter_prefix_digests,
    qualify_scope,
)
from kedge.planning.anchors import is_unusable_status
from kedge.planning.digests import get_prefix_index
from kedge.server.engine_models.output_emitter import OutputEmitter
from kedge.server.engine_models.turn_builder import DecryptReasoning, build_turn
from kedge.server.errors import CONTEXT_TOO_LONG, RATE_LIMITED, ApiError
from kedge.server.models import DEFAULT_GRACE, ItemClosed, OutputEvent, OutputTruncated, Prompt
from kedge.server.practice_model import PracticeRequest
from kedge.turns import Turn, user

log = logging.getLogger("kedge.server.engine_models")

MAX_ANCHORS = 10_000
"""The number of upstream responses that an engine model remembers, of all users; the oldest are dropped first."""
MAX_CANDIDATES = 64
"""The number of the longest known prefixes of a request from which the planner chooses its anchor."""
DEFAULT_WINDOW = 128_000
"""The default context length, in tokens."""

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
"""Parameters that change the answer, forwarded to every API."""
ACCOUNT_PARAMS = ("user", "safety_identifier", "service_tier")
"""Parameters about the account, for the APIs of the two large providers."""
CACHE_PARAMS = ("prompt_cache_key", "prompt_cache_retention")
"""Parameters about the cache, for the APIs of OpenAI."""
CLIENT_TOOL_TYPES = frozenset({"function", "custom"})
"""The tools that every API has; hosted tools run only at providers of the Responses API."""
ANTHROPIC_TIERS: Mapping[str, str] = {"auto": "auto", "default": "standard_only"}
SUMMARY_PROMPT = (
    "Summarize the conversation above, so that you can continue from the summary alone. Keep every fact, "
    "name, number, decision, open question and request of the user. Write plain text, briefly."
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
"""Reasons for which an answer may stop early, and their names in the Responses API."""


class EngineModel:
    """A model of the server that sends its requests to an engine.

    Args:
        name: The model's name in ``GET /v1/models``.
        engine: The engine; ``aclose`` closes it.
        window: The model's context length, in tokens of the model.
        tokens: The model's tokens per token of the server's count, for models with smaller tokens.
        stateless: Whether to send the full context with every request and never chain upstream.
        params: Parameters of every request; values in a request take precedence.

    Example:
        >>> settings = Settings(model=EngineModel("small", connect("ollama:llama3.2")))
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
        check_type("engine", Engine, engine)
        check_positive_int("window", window)
        self.name = name
        self.window = max(1, int(window / tokens))
        self.grace = DEFAULT_GRACE
        self._engine = engine
        self._params = dict(params or {})
        self._inner = inner = unwrap(engine)
        self._can_chain = isinstance(inner, ResponsesEngine) and not stateless
        self._is_stateless_api = isinstance(inner, ChatCompletionsEngine | AnthropicEngine)
        self._omitted_tools: set[str] = set()
        self._forwarded = FORWARDED_PARAMS
        if isinstance(inner, ResponsesEngine | ChatCompletionsEngine | AnthropicEngine):
            self._forwarded += ACCOUNT_PARAMS
        if isinstance(inner, ResponsesEngine | ChatCompletionsEngine):
            self._forwarded += CACHE_PARAMS
        self._scope = str(getattr(inner, "scope", ""))
        self._index = MemoryAnchorIndex(MAX_ANCHORS)

    async def answer(self, prompt: Prompt) -> AsyncGenerator[OutputEvent]:
        """Send a prompt to the engine and yield its output as it arrives.

        Args:
            prompt: The prompt.

        Yields:
            The output events.

        Raises:
            ApiError: If the engine fails.
        """
        try:
            build = partial(self._build_turn, prompt.ask, prompt.decrypt_reasoning)
            turn = await compute(build, is_long=len(prompt.ask.items) > MANY_ITEMS)
            request = Request(
                mode="chained" if self._can_chain else "stateless",
                tools=self._select_tools(prompt.ask.tools),
                params={**self._params, **self._build_params(prompt)},
                candidates=self._find_candidates(turn, prompt.namespace),
                streaming=prompt.stream,
                keep_reasoning=prompt.keep_reasoning,
                filters=find_filters(self._engine),
            )
            output = self._stream_output(turn, request, prompt)
            async with aclosing(output) as events:
                async for event in events:
                    yield event
        except KedgeError as error:
            raise to_api_error(error) from error

    async def summarize(self, items: Sequence[Mapping[str, Any]]) -> str:
        """Summarize the items that a compaction removes.

        Args:
            items: The items.

        Returns:
            The model's summary; empty if the model fails.
        """
        try:
            context = self._build_turn(PracticeRequest(items=items), lambda _: None)
            turn = context.append(user(SUMMARY_PROMPT))
            params: dict[str, Any] = {**self._params, "max_output_tokens": MAX_SUMMARY_TOKENS}
            finished = await self._engine.run(
                turn, mode="stateless", keep_reasoning=False, **params
            )
        except KedgeError as error:
            to_api_error(error)  # logs the error
            return ""
        return answer_text(finished)

    async def aclose(self) -> None:
        """Close the connections upstream."""
        await self._engine.aclose()

    def _build_turn(self, ask: PracticeRequest, decrypt_reasoning: DecryptReasoning) -> Turn:
        if self._is_stateless_api and any(
            item.get("type") == "additional_tools" for item in ask.items
        ):
            raise errors.UnsupportedParameter(
                "input",
                "send the tools as 'tools' (Codex does so if its 'model' is a name that it does not "
                "know)",
                "the API of the model has no additional_tools items",
            )
        text_results = isinstance(self._inner, ChatCompletionsEngine)
        return build_turn(ask, decrypt_reasoning, self._scope, text_results=text_results)

    def _find_candidates(self, turn: Turn, namespace: str) -> tuple[AnchorRecord, ...]:
        """Return the known upstream responses of a user that cover a prefix of this Turn, the longest first."""
        if not self._can_chain:
            return ()
        entries = iter_candidates(
            self._index,
            qualify_scope(namespace, self._scope),
            iter_prefix_digests(get_prefix_index(turn)),
        )
        return tuple(entry.record for entry in islice(entries, MAX_CANDIDATES))

    def _index_responses(self, turn: Turn, namespace: str) -> None:
        """Add the stored responses of a Turn to the index of a user, and remove the lost ones."""
        for record in get_state(turn).anchors:
            scope = qualify_scope(namespace, record.scope)
            is_lost = record.status == "lost" or is_unusable_status(record.status)
            if record.status == "completed" and record.stored:
                # If the id was there with other content, it is unknown which of the two the server has stored.
                is_lost = self._index.add(scope, IndexedResponse(record))
            if is_lost:
                self._index.mark_lost(scope, record.response_id)

    def _select_tools(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return the tools without hosted ones, which agents offer by default, if the upstream API has none."""
        if not self._is_stateless_api:
            return tuple(tools)
        for kind in {str(tool.get("type")) for tool in tools} - CLIENT_TOOL_TYPES:
            if kind not in self._omitted_tools:
                self._omitted_tools.add(kind)
                log.warning("%s has no hosted tool %s; it is not offered there", self.name, kind)
        return tuple(tool for tool in tools if tool.get("type") in CLIENT_TOOL_TYPES)

    def _build_params(self, prompt: Prompt) -> dict[str, Any]:
        """Return the parameters to forward, in the names of the Responses API."""
        body = prompt.body
        engine = self._inner
        params = {name: body[name] for name in self._forwarded if body.get(name) is not None}
        if "service_tier" in params and isinstance(engine, AnthropicEngine):
            if params["service_tier"] not in ANTHROPIC_TIERS:
                raise errors.UnsupportedParameter("service_tier", "use auto or default")
            params["service_tier"] = ANTHROPIC_TIERS[params["service_tier"]]
        if not self._select_tools(prompt.ask.tools):
            params.pop("parallel_tool_calls", None)
            if params.get("tool_choice") in ("auto", "none"):
                del params["tool_choice"]
        # The server handles the other values.
        if LOGPROBS in (body.get("include") or ()) and not isinstance(engine, AnthropicEngine):
            params["include"] = [LOGPROBS]
        if prompt.max_tokens is not None:
            params["max_output_tokens"] = prompt.max_tokens
        text = _drop_nulls(body, "text")
        if text and text != {"format": {"type": "text"}}:
            params["text"] = text
        reasoning = _drop_nulls(body, "reasoning")
        if isinstance(engine, ChatCompletionsEngine):
            reasoning.pop("summary", None)  # not supported; the server shows the reasoning
        if reasoning:
            params["reasoning"] = reasoning
        return params

    async def _stream_output(
        self, turn: Turn, request: Request, prompt: Prompt
    ) -> AsyncGenerator[OutputEvent]:
        # With a guard, an answer is shown only when it is complete: its blocks are the output, in their order.
        is_held = any(request_filter.holds_output for request_filter in find_filters(self._engine))
        streaming = prompt.stream and not is_held
        emitter = OutputEmitter(prefix_digest(turn))
        try:
            async with aclosing(self._engine.events(turn, request)) as events:
                async for event in events:
                    if isinstance(event, Healed):
                        self._index.mark_lost(
                            qualify_scope(prompt.namespace, self._scope), *event.lost
                        )
                        emitter = OutputEmitter(emitter.prefix_digest)  # nothing was emitted yet
                    elif isinstance(event, AnswerFinished):
                        self._index_responses(event.turn, prompt.namespace)
                        for output in emitter.finish(event.outcome):
                            yield output
                    elif streaming:
                        for output in emitter.feed(event):
                            yield output
                    else:
                        emitter.assembler.feed(event)
        except errors.AnswerIncomplete as error:
            reason = INCOMPLETE_REASONS.get(error.code)
            if reason is None:
                raise
            for output in _finish_incomplete(emitter, error):
                yield output
            yield OutputTruncated(reason)


def _drop_nulls(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the members of a parameter that are not null."""
    members: Mapping[str, Any] = body.get(name) or {}
    return {name: value for name, value in members.items() if value is not None}


def _finish_incomplete(emitter: OutputEmitter, error: errors.AnswerIncomplete) -> list[OutputEvent]:
    """Return the output of an answer that stopped early; its last item is left open."""
    outcome = Outcome("incomplete", error.partial, usage=emitter.assembler.finish().usage)
    events = list(emitter.finish(outcome))
    for index in reversed(range(len(events))):
        if isinstance(events[index], ItemClosed):
            del events[index]
            break
    return events


CONTEXT_LENGTH_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
CONTEXT_LENGTH_PHRASES = ("context length", "context window", "context size", "prompt is too long")
GENERIC_CODES = frozenset(
    {"", "400", "500", "501", "error", "invalid_request_error", "server_error", "api_error"}
)
"""Codes that have no more information than the status."""
OVERLOADED_STATUSES = frozenset({503, 529})
MAX_LOGGED_REASON = 500
"""Characters of a provider's message in the log; a message may quote a long input."""


def to_api_error(error: KedgeError) -> ApiError:
    """Log a failure of the model behind the server and map it to an error of the API.

    Args:
        error: The error of the engine.

    Returns:
        The error to send to the client.
    """
    log.warning("the model behind this server failed: %s", _describe_error(error))
    reason = _get_reason(error)
    match error:
        case errors.RateLimited():
            mapped = RATE_LIMITED(seconds=f"{error.retry_after or 1:g}")
            mapped.headers |= _list_headers(error)
            return mapped
        case errors.NotAuthorized():  # without the provider's message, which may contain a part of the key
            detail = "rejected this server's API key; the operator of this server has to replace it"
            return _build_upstream_error(error, 502, "not_authorized", detail)
        case errors.RequestRefused() | errors.ServerFailed():
            return _map_engine_error(error)
        case errors.StreamCut():
            detail = "ended its stream before the answer was complete; the same request may succeed later"
            return _build_upstream_error(error, 502, "cut", detail)
        case errors.Unreachable() | errors.CannotConnect() if "in time" in reason:
            return _build_upstream_error(error, 504, "timeout", "did not answer in time")
        case errors.Unreachable() | errors.CannotConnect():
            return _build_upstream_error(error, 503, "unreachable", f"cannot be reached: {reason}")
        case (
            errors.UnsupportedParameter()
            | errors.UnsupportedBlock()
            | errors.Unsendable()
            | errors.InvalidTurn()
        ):
            return ApiError(
                f"The model behind this server does not support this request: {error}",
                param=getattr(error, "param", None),
                code="unsupported_parameter",
            )
        case _:
            return _build_upstream_error(error, 502, "error", "failed in an unexpected way")


def _describe_error(error: KedgeError) -> str:
    """Name a failure for the log, with the provider's reason."""
    words = [type(error).__name__]
    if isinstance(error, EngineError):
        details = (error.provider, error.status, error.code, error.request_id)
        words += [str(detail) for detail in details if detail]
    if isinstance(error, errors.NotAuthorized):  # the message may contain a part of the key
        return ", ".join(words)
    return f"{', '.join(words)}: {_get_reason(error)[:MAX_LOGGED_REASON]}"


def _get_reason(error: KedgeError) -> str:
    if isinstance(error, EngineError):
        return error.message
    return str(error)


def _list_headers(error: KedgeError) -> dict[str, str]:
    retry_after = getattr(error, "retry_after", None)
    if retry_after is None:
        return {}
    return {"retry-after": f"{retry_after:g}"}


def _build_upstream_error(error: KedgeError, status: int, code: str, detail: str) -> ApiError:
    provider = getattr(error, "provider", "") or "upstream"
    return ApiError(
        f"The model behind this server ({provider}) {detail.rstrip('.')}.",
        status=status,
        code=f"upstream_{code}",
        headers=_list_headers(error),
    )


def _map_engine_error(error: EngineError) -> ApiError:
    """Map a rejection or a failure by whether the same request can succeed later."""
    reason = error.message
    if error.status in OVERLOADED_STATUSES:
        return _build_upstream_error(error, 503, "overloaded", "is overloaded; try again later")
    if error.status == 404:
        return _build_upstream_error(error, 502, "not_found", f"was not found there: {reason}")
    if error.code in CONTEXT_LENGTH_CODES or any(
        phrase in reason.lower() for phrase in CONTEXT_LENGTH_PHRASES
    ):
        return CONTEXT_TOO_LONG()
    if error.retryable:
        detail = "failed; the same request may succeed later"
        return _build_upstream_error(error, 502, "failed", detail)
    return ApiError(
        f"The model behind this server ({error.provider}) rejected the request: {reason}",
        param=error.param or None,
        code="upstream_refused" if error.code in GENERIC_CODES else error.code,
    )
