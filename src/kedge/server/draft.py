"""From a valid request to a draft of its response: the state phase, in the documented order.

Whatever the request refers to is looked up, its input is written out, and the whole that a model
will see is put together and checked. Nothing is written to the database here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.practice import Ask
from kedge.server import errors, resource
from kedge.server.contexts import Context
from kedge.server.ids import new_key, response_id
from kedge.server.items import written_out
from kedge.server.models import Prompt
from kedge.server.service import Service
from kedge.server.wire import Item
from kedge.tokens import count_items, count_json, count_text

Body = Mapping[str, Any]

CHAINABLE = frozenset({"completed", "incomplete"})
"""Statuses of responses that can be continued."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a request builds upon: a context, and the node it ends at."""

    context: Context
    node: int | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A response that is about to be written."""

    key: str
    body: Body
    head: Mapping[str, Any]
    past: Past
    items: list[Item]
    item_tokens: int
    input_tokens: int
    store: bool
    prompt: Prompt


def draft(service: Service, body: Body) -> Draft:
    """Prepare the response to a valid request, or raise the ApiError of what is wrong with it."""
    past = find_past(service, body)
    if not body["input"] and past.node is None and past.conversation is None:
        raise errors.NOTHING_TO_ANSWER()
    key = new_key()
    items = written_out(body["input"], key)
    store = body.get("store") is not False and not service.settings.zero_data_retention
    item_tokens = count_items(items)
    return Draft(
        key=key,
        body=body,
        head=resource.head(response_id(key), int(service.clock()), body, store=store),
        past=past,
        items=items,
        item_tokens=item_tokens,
        input_tokens=past.context.tokens + item_tokens + count_settings(body),
        store=store,
        prompt=Prompt(
            ask=_ask(body, past.context.as_seen() + items),
            body=body,
            live=bool(body.get("stream")),
            most=body.get("max_output_tokens"),
        ),
    )


def find_past(service: Service, body: Body) -> Past:
    """Look up what a request refers to."""
    conversation, previous = body.get("conversation"), body.get("previous_response_id")
    if conversation is not None and previous is not None:
        raise errors.MUTUALLY_EXCLUSIVE()
    if conversation is not None:
        return _in_conversation(
            service, conversation if isinstance(conversation, str) else conversation["id"]
        )
    if previous is not None:
        return _after(service, previous)
    return Past(service.nodes.context(None))


def _in_conversation(service: Service, id: str) -> Past:
    found = service.conversations.find(id)
    if found is None:
        raise errors.CONVERSATION_NOT_FOUND(id=id)
    return Past(service.nodes.context(found.node), found.node, found.id)


def _after(service: Service, id: str) -> Past:
    if service.settings.zero_data_retention:
        raise errors.ZERO_DATA_RETENTION()
    stored = service.responses.find(id)
    if stored is None:
        raise errors.PREVIOUS_RESPONSE_NOT_FOUND(id=id)
    if stored.status not in CHAINABLE:
        raise errors.PREVIOUS_RESPONSE_UNFINISHED(id=id, status=stored.status)
    return Past(service.nodes.context(stored.node), stored.node)


def count_settings(body: Body) -> int:
    """Count the tokens of what is sent afresh with every request: instructions and tools."""
    instructions, tools = body.get("instructions"), body.get("tools")
    tokens = count_text(instructions) if isinstance(instructions, str) else 0
    return tokens + (count_json(tools) if tools else 0)


def _ask(body: Body, items: list[Item]) -> Ask:
    text: Body = body.get("text") or {}
    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    return Ask(
        items=items,
        instructions=body.get("instructions"),
        tools=body.get("tools") or (),
        tool_choice="auto" if choice is None else choice,
        parallel_tool_calls=parallel is not False,
        text_format=text.get("format"),
        reasoning=body.get("reasoning"),
    )
