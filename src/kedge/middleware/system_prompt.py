"""``system_prompt``: set the instructions of every Turn; ``on_response_started``: report response ids.

Leading system text is not part of any digest, so it may change with every request without losing anchors.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import isawaitable

from kedge.engines.base import Engine, Events, Middleware, Request, iter_stack
from kedge.errors import InvalidSetting
from kedge.events import ResponseStarted
from kedge.middleware.base import BaseMiddleware
from kedge.turns import Turn, system

ResponseIdCallback = Callable[[str], Awaitable[object] | object]


def on_response_started(callback: ResponseIdCallback) -> Middleware:
    """Call a function with the id of each response as soon as the server has started it.

    Args:
        callback: A function that is called with the id; may be async.

    Returns:
        A middleware for ``with_middleware``.
    """
    return lambda engine: _ResponseStartedMiddleware(engine, callback)


class _ResponseStartedMiddleware(BaseMiddleware):
    name = "notice"

    def __init__(self, inner: Engine, callback: ResponseIdCallback) -> None:
        super().__init__(inner)
        self.callback = callback

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and report ids."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, ResponseStarted) and event.response_id:
                    result = self.callback(event.response_id)
                    if isawaitable(result):
                        await result
                yield event


NAME = "system_prompt"
LEVEL_KEY = "kedge.prompt_level"
"""Metadata key of a prompt with others inside of it: their number. It distinguishes the prompts of a stack."""


def system_prompt(text: str | Callable[[Turn], str]) -> Middleware:
    """Put instructions at the start of every Turn.

    Several prompts in one stack follow each other, the outermost first.

    Args:
        text: The instructions, or a function that returns them for a Turn.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: ``text`` is neither a text nor a function.
    """
    if not isinstance(text, str) and not callable(text):
        kind = type(text).__name__
        raise InvalidSetting(
            f"a system prompt must be a text, or a function that returns it for a Turn, not {kind}"
        )

    return lambda engine: _SystemPromptMiddleware(engine, text)


class _SystemPromptMiddleware(BaseMiddleware):
    name = NAME

    def __init__(self, inner: Engine, text: str | Callable[[Turn], str]) -> None:
        super().__init__(inner)
        self.text = text
        self.level = _count_prompts(inner)

    def enter(self, turn: Turn) -> Turn:
        """Return the Turn with the text at its start, replacing that of an earlier request."""
        text = self.text if isinstance(self.text, str) else _call_function(self.text, turn)
        metadata = {LEVEL_KEY: self.level} if self.level else {}
        outer = 0
        for index, block in enumerate(turn.leading):
            if block.origin != NAME:
                continue
            level = block.metadata.get(LEVEL_KEY, 0)
            if level == self.level:
                fresh = system(text, origin=NAME, id=block.id, metadata=metadata)
                return turn if fresh == block else turn.replace(block.id, fresh)
            if level > self.level:
                outer = index + 1
        return turn.insert(outer, system(text, origin=NAME, metadata=metadata))


def _call_function(function: Callable[[Turn], str], turn: Turn) -> str:
    text = function(turn)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(text).__name__
        raise InvalidSetting(f"the function of a system prompt must return a text, not {kind}")
    return text


def _count_prompts(engine: Engine) -> int:
    """Return the number of prompts in a stack."""
    return sum(isinstance(each, _SystemPromptMiddleware) for each in iter_stack(engine))
