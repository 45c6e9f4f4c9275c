"""From a valid request to a draft of its response: the state phase, in the documented order.

Whatever the request refers to is looked up, its input is written out, and the whole that a model
will see is put together and checked. Nothing is written to the database here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.practice import Ask
from kedge.server import errors, resource
from kedge.server.choosing import check_tool_choice
from kedge.server.coherence import check_request, check_sealed, resolve
from kedge.server.compaction import Compacted, compact, is_triggered, newest_exchange
from kedge.server.contexts import Context
from kedge.server.ids import new_key, response_id
from kedge.server.items import written_out
from kedge.server.models import Model, Prompt
from kedge.server.nodes import from_barrier, is_barrier
from kedge.server.recall import recalled
from kedge.server.service import Service
from kedge.server.sockets.memory import Place
from kedge.server.validation import check_exclusive, check_not_empty, check_prompt
from kedge.server.wire import Item
from kedge.tokens import count_items, count_json, count_text

Body = Mapping[str, Any]

CHAINABLE = frozenset({"completed", "incomplete"})
"""Statuses of responses that can be continued."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a request builds upon: a context, and the node it ends at.

    A ``loose`` past ends at no node: only a connection remembers it, and whoever is stored upon it
    must keep all of it.
    """

    context: Context
    node: int | None = None
    conversation: str | None = None
    loose: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What a model sees of a request, how many tokens that is, and how many of them are new."""

    items: Sequence[Item]
    tokens: int
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A response that is about to be written.

    ``input`` is what the request itself brings. ``kept`` is what a compaction keeps, where this
    response makes one; ``silent`` says that no model is asked.
    """

    key: str
    asked: Mapping[str, Any]
    past: Past
    input: list[Item]
    new_tokens: int
    input_tokens: int
    cached: int
    store: bool
    prompt: Prompt
    compacted: Compacted | None
    silent: bool
    model: Model


def draft(service: Service, body: Body, place: Place | None = None) -> Draft:
    """Prepare the response to a valid request, or raise the ApiError of what is wrong with it.

    ``place`` is the memory of the connection that the request came over, if that has one.
    """
    past = find_past(service, body, place)
    check_not_empty(body)
    key = new_key(service.nodes.next_number())
    items = taken_in(service, body["input"], key, past)
    whole = view_of(service, body, past, items)
    model = service.find_model(body["model"])
    check_abilities(service, body, on_socket=place is not None)
    check_tool_choice(body, whole.items)
    triggered = is_triggered(items)
    window = model.window
    compacted = _compacted(body, whole, window, triggered=triggered)
    seen = fitted(_shortened(whole, compacted), body, window)
    store = is_stored(service, body)
    return Draft(
        key=key,
        asked=resource.asked(response_id(key), int(service.clock()), body, store=store),
        past=past,
        input=items,
        new_tokens=whole.new_tokens,
        input_tokens=seen.tokens if compacted is None else whole.tokens,
        cached=0 if is_barrier(items) else _cached(recalled(past.context).tokens, seen.tokens),
        store=store,
        prompt=Prompt(
            ask=as_ask(body, seen.items),
            body=body,
            live=bool(body.get("stream")),
            most=body.get("max_output_tokens"),
            unseal=service.unseal,
        ),
        compacted=compacted,
        silent=triggered or body.get("generate") is False,
        model=model,
    )


def find_past(service: Service, body: Body, place: Place | None = None) -> Past:
    """Look up what a request refers to."""
    check_exclusive(body)
    conversation, previous = body.get("conversation"), body.get("previous_response_id")
    past = Past(service.nodes.context(None))
    if conversation is not None:
        past = _in_conversation(
            service, conversation if isinstance(conversation, str) else conversation["id"]
        )
    check_prompt(body)
    return past if previous is None else _after(service, previous, place)


def _in_conversation(service: Service, id: str) -> Past:
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    found = service.conversations.find(id)
    if found is None:
        raise errors.CONVERSATION_NOT_FOUND(id=id)
    return Past(service.nodes.context(found.node), found.node, found.id)


def _after(service: Service, id: str, place: Place | None) -> Past:
    remembered = place and place.find(id)
    if remembered is not None:
        return Past(remembered, loose=True)
    if service.settings.zero_data_retention:
        # On a socket it is no fault to ask: it may have been remembered a moment ago.
        raise errors.ZERO_DATA_RETENTION() if place is None else _lost(id)
    found = service.responses.find(id)
    if found is None:
        raise _lost(id)
    node, status = found
    if status not in CHAINABLE:
        raise errors.PREVIOUS_RESPONSE_UNFINISHED(id=id, status=status)
    return Past(service.nodes.context(node), node)


def _lost(id: str) -> errors.ApiError:
    return errors.PREVIOUS_RESPONSE_NOT_FOUND(id=id)


def taken_in(service: Service, input: str | Sequence[Item], key: str, past: Past) -> list[Item]:
    """Take a request's input in: resolved, checked against the past, and written out in full."""
    sent = [{"role": "user", "content": input}] if isinstance(input, str) else input
    items = resolve(sent, service.known)
    check_request(past.context.coherence, items, service.known)
    check_sealed(items, service.sealer.open)
    return written_out(items, key)


def check_abilities(service: Service, body: Body, *, on_socket: bool = False) -> None:
    """Refuse what this server cannot do."""
    if body.get("background"):
        if on_socket:
            raise errors.BACKGROUND_ON_SOCKET()
        if not is_stored(service, body):
            raise errors.BACKGROUND_UNSTORED()


def is_stored(service: Service, body: Body) -> bool:
    """Whether the response to this request is stored."""
    return body.get("store") is not False and not service.settings.zero_data_retention


def view_of(service: Service, body: Body, past: Past, items: Sequence[Item]) -> View:
    """Put together what a model sees: the past, unless a compaction stands for it, and the new."""
    settings = count_settings(body)
    if is_barrier(items):
        seen = service.read(from_barrier(items))
        return View(seen, settings + count_items(seen))
    context = recalled(past.context)
    new = count_items(items)
    return View([*context.as_seen(), *items], settings + context.tokens + new, new)


def count_settings(body: Body) -> int:
    """Count the tokens of what is sent afresh with every request: instructions and tools."""
    instructions, tools = body.get("instructions"), body.get("tools")
    tokens = count_text(instructions) if isinstance(instructions, str) else 0
    return tokens + (count_json(tools) if tools else 0)


def fitted(view: View, body: Body, window: int) -> View:
    """Fit a view into a model's window: drop the oldest exchanges where the request allows it."""
    if view.tokens <= window:
        return view
    if body.get("truncation") != "auto":
        raise errors.CONTEXT_TOO_LONG()
    items, tokens = list(view.items), view.tokens
    while tokens > window:
        start = _second_exchange(items)
        if start is None:
            raise errors.CONTEXT_TOO_LONG()
        tokens -= count_items(items[:start])
        items = items[start:]
    return View(items, tokens)


def _second_exchange(items: Sequence[Item]) -> int | None:
    for index in range(1, newest_exchange(items) + 1):
        if items[index].get("role") == "user":
            return index
    return None


async def summarised(draft: Draft) -> Draft:
    """Let the model sum up what a compaction leaves out, where it can."""
    made, asked = draft.compacted, draft.prompt.ask
    if made is None or not made.left_out:
        return draft
    summary = await draft.model.summarise(made.left_out)
    if not summary:
        return draft
    told = replace(made, summary=summary)
    # The note comes first, unless it had to go to make room.
    noted = list(asked.items[:1]) == made.items[:1]
    items = [*told.items[:1], *asked.items[1:]] if noted else asked.items
    prompt = replace(draft.prompt, ask=replace(asked, items=items))
    return replace(draft, compacted=told, prompt=prompt)


def _shortened(whole: View, compacted: Compacted | None) -> View:
    if compacted is None:
        return whole
    items = compacted.items
    return View(items, count_items(items))


def _compacted(body: Body, view: View, window: int, *, triggered: bool) -> Compacted | None:
    """Decide whether this response compacts its context, and what it keeps if so."""
    if triggered:
        return compact(view.items[:-1], view.tokens // 2)
    for entry in body.get("context_management") or ():
        threshold = entry.get("compact_threshold") or window
        if view.tokens > threshold:
            return compact(view.items, threshold // 2)
    return None


def _cached(past: int, seen: int) -> int:
    return min(past, seen) if past >= resource.LEAST_CACHED else 0


def as_ask(body: Body, items: Sequence[Item]) -> Ask:
    """Say what is asked of a model by this request and these items."""
    text: Body = body.get("text") or {}
    choice = body.get("tool_choice")
    return Ask(
        items=items,
        instructions=body.get("instructions"),
        tools=body.get("tools") or (),
        tool_choice="auto" if choice is None else choice,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        text_format=text.get("format"),
        reasoning=body.get("reasoning"),
    )
