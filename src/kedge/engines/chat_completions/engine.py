"""ChatCompletionsEngine: any server of the Chat Completions API, OpenAI's own or one on this machine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kedge.engines.chat_completions.params import check_count, table, tool
from kedge.engines.chat_completions.render import messages
from kedge.engines.protocol import Request
from kedge.engines.stateless import StatelessEngine
from kedge.engines.translating import translated
from kedge.errors import EngineError
from kedge.events.chat import ChatDecoder
from kedge.planning import RequestPlan

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_TOKENS = "max_tokens"
IDLE: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
"""What says nothing without tools, and what servers refuse without them."""


class ChatCompletionsEngine(StatelessEngine):
    """An engine for any server of the Chat Completions API.

    ``make_client`` makes the openai client that carries requests. ``max_tokens`` is the name under which
    the server takes the limit of an answer: nearly all go by ``max_tokens``, OpenAI's newer models only
    by ``max_completion_tokens``. ``max_call_id`` is how long the ids of calls may be (at OpenAI 40
    characters); longer ones go by another. With ``replay_reasoning`` the thoughts of earlier answers go
    back as ``reasoning_content``, as DeepSeek, Kimi and others want it between calls; a server that
    refuses a request for the lack of them gets them from then on.
    """

    path = "/chat/completions"

    def __init__(
        self,
        model: str,
        *,
        make_client: "Callable[[], AsyncOpenAI]",
        scope: str,
        provider: str = "chat",
        max_tokens: str = MAX_TOKENS,
        max_call_id: int | None = None,
        replay_reasoning: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, make_client=make_client, scope=scope, provider=provider, **settings)
        self._table = table(max_tokens)
        self._max_call_id = max_call_id
        self._unsealed = replay_reasoning

    def _decoder(self) -> ChatDecoder:
        return ChatDecoder()

    def _body(
        self, plan: RequestPlan, request: Request, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        check_count(params)
        body: dict[str, Any] = {
            "model": request.model or self.model,
            "messages": messages(plan, self.name, self._max_call_id),
        }
        if request.tools:
            body["tools"] = [tool(each) for each in request.tools]
        if request.streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        more = translated(params, self._table)
        if "tools" not in {**body, **more}:
            more = {k: v for k, v in more.items() if k not in IDLE or v not in IDLE[k]}
        return {**body, **more, **self._streaming(body, more, params)}

    def _refuses_reasoning(self, error: EngineError) -> bool:
        return self._unsealed and self._wants(error)

    def _wants_reasoning(self, error: EngineError) -> bool:
        return not self._unsealed and self._wants(error)

    @staticmethod
    def _wants(error: EngineError) -> bool:
        return error.status in (400, 422) and "reasoning_content" in error.message

    @staticmethod
    def _streaming(body: Any, more: Any, params: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a stream, with ours among them, unless the caller wants none."""
        if "stream_options" not in body:
            return {}
        if "stream_options" in params and params["stream_options"] is None:
            return {"stream_options": None}
        return {"stream_options": {**body["stream_options"], **more.get("stream_options", {})}}
