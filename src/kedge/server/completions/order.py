"""Do the messages of a chat fit together? Tool messages answer the calls right before them."""

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.server.completions import refusals

Message = Mapping[str, Any]


def check_order(messages: Sequence[Message]) -> None:
    """Refuse a tool message without its call, a call without its tool message, an empty answer."""
    waiting: list[str] = []
    called: frozenset[str] = frozenset()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _answer(message["tool_call_id"], waiting, called, index)
            continue
        _check_answered(waiting, index)
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
        called = frozenset(waiting)
        if message["role"] == "assistant":
            _check_said(message, index)
    _check_answered(waiting, len(messages))


def _answer(id: str, waiting: list[str], called: frozenset[str], index: int) -> None:
    if not called:
        raise refusals.TOOL_WITHOUT_CALLS(index=index)
    if id not in called:
        raise refusals.CALL_UNKNOWN(id=id, index=index)
    if id in waiting:
        waiting.remove(id)


def _check_answered(waiting: Sequence[str], index: int) -> None:
    if waiting:
        raise refusals.CALLS_UNANSWERED(ids=", ".join(waiting), index=index)


def _check_said(message: Message, index: int) -> None:
    if message.get("function_call") is not None:
        raise refusals.FUNCTION_CALLED(index=index)
    empty = message.get("content") is None and message.get("refusal") is None
    if empty and not message.get("tool_calls"):
        raise refusals.CONTENT_NULL(index=index)
