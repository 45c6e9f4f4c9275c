"""From a valid request to a draft of its response: the state phase, in the documented order.

Whatever the request refers to is looked up, its input is written out, and the whole that a model
will see is put together and checked. Nothing is written to the database here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.practice import PracticeRequest
from kedge.server import errors, response_object
from kedge.server.coherence import (
    check_encrypted_content,
    check_request,
    is_reference,
    resolve_references,
)
from kedge.server.compaction import (
    CompactedContext,
    compact,
    find_newest_exchange,
    has_compaction_trigger,
)
from kedge.server.item_forms import normalize_items
from kedge.server.json_codec import Item
from kedge.server.models import Model, Prompt
from kedge.server.state import ServerState
from kedge.server.storage.context import Context, UnstoredResponses, truncate_history
from kedge.server.storage.ids import make_response_id, new_key
from kedge.server.storage.items import has_compaction, slice_from_compaction
from kedge.server.token_counting import count_items, count_json, count_text, precount
from kedge.server.validation import (
    check_exclusive,
    check_not_empty,
    check_prompt,
    check_tool_choice,
)

Body = Mapping[str, Any]

CHAINABLE_STATUSES = frozenset({"completed", "incomplete"})
"""Statuses of responses that can be continued."""


@dataclass(frozen=True, slots=True)
class History:
    """What a request builds upon: a context, and the node it ends at.

    A ``loose`` past ends at no node: only a connection remembers it, and whoever is stored upon it
    must keep all of it.
    """

    context: Context
    node: int | None = None
    conversation: str | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model sees of a request, how many tokens that is, and how many of them are new."""

    items: Sequence[Item]
    tokens: int
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """A response that is about to be written.

    ``input`` is what the request itself brings. ``kept`` is what a compaction keeps, where this
    response makes one; ``silent`` says that no model is asked.
    """

    key: str
    request_fields: Mapping[str, Any]
    history: History
    input: list[Item]
    new_tokens: int
    input_tokens: int
    cached_tokens: int
    store: bool
    prompt: Prompt
    compacted: CompactedContext | None
    skip_model: bool
    model: Model


def prepare_response(
    service: ServerState, body: Body, unstored: UnstoredResponses | None = None
) -> ResponseDraft:
    """Prepare the response to a valid request, or raise the ApiError of what is wrong with it.

    ``unstored`` has the unstored responses of the connection of the request, if it is a WebSocket.
    """
    past = find_history(service, body, unstored)
    check_not_empty(body)
    key = new_key(service.nodes.next_number())
    items = resolve_input(service, body["input"], key, past)
    whole = build_model_input(service, body, past, items)
    model = service.find_model(body["model"])
    check_supported(service, body, on_socket=unstored is not None)
    check_tool_choice(body, whole.items)
    triggered = has_compaction_trigger(items)
    window = model.window
    compacted = _compact_if_needed(body, whole, window, triggered=triggered)
    seen = truncate_to_window(_apply_compaction(whole, compacted), body, window)
    store = should_store(service, body)
    return ResponseDraft(
        key=key,
        request_fields=response_object.build_request_fields(
            make_response_id(key), int(service.clock()), body, store=store
        ),
        history=past,
        input=items,
        new_tokens=whole.new_tokens,
        input_tokens=seen.tokens if compacted is None else whole.tokens,
        cached_tokens=0
        if has_compaction(items)
        else _count_cached_tokens(truncate_history(past.context).tokens, seen.tokens),
        store=store,
        prompt=Prompt(
            ask=build_ask(body, seen.items),
            body=body,
            stream=bool(body.get("stream")),
            max_tokens=body.get("max_output_tokens"),
            decrypt_reasoning=service.decrypt_reasoning,
        ),
        compacted=compacted,
        skip_model=triggered or body.get("generate") is False,
        model=model,
    )


def find_history(
    service: ServerState, body: Body, unstored: UnstoredResponses | None = None
) -> History:
    """Look up what a request refers to."""
    check_exclusive(body)
    conversation, previous = body.get("conversation"), body.get("previous_response_id")
    past = History(service.nodes.load_context(None))
    if conversation is not None:
        past = _find_conversation_history(
            service, conversation if isinstance(conversation, str) else conversation["id"]
        )
    check_prompt(body)
    return past if previous is None else _find_response_history(service, previous, unstored)


def _find_conversation_history(service: ServerState, id: str) -> History:
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    found = service.conversations.find(id)
    context = None if found is None else _load_context(service, found.node)
    if found is None or context is None:
        raise errors.CONVERSATION_NOT_FOUND(id=id)
    return History(context, found.node, found.id)


def _find_response_history(
    service: ServerState, id: str, unstored: UnstoredResponses | None
) -> History:
    remembered = None if unstored is None else unstored.find(id)
    if remembered is not None:
        return History(remembered, in_memory=True)
    if service.settings.zero_data_retention:
        # On a socket it is no fault to ask: it may have been remembered a moment ago.
        raise errors.ZERO_DATA_RETENTION() if unstored is None else _previous_not_found(id)
    found = service.responses.find(id)
    if found is None:
        raise _previous_not_found(id)
    node, status = found
    if status not in CHAINABLE_STATUSES:
        raise errors.PREVIOUS_RESPONSE_UNFINISHED(id=id, status=status)
    context = _load_context(service, node)
    if context is None:
        raise _previous_not_found(id)
    return History(context, node)


def _load_context(service: ServerState, node: int | None) -> Context | None:
    """Load a stored context, or return None if it starts at a compaction that version 0.1 encrypted.

    Such a context is lost, so it is reported as missing: that is the error on which clients resend
    the conversation.
    """
    try:
        return service.nodes.load_context(node)
    except errors.ApiError as error:
        if error.template is not errors.INVALID_ENCRYPTED_CONTENT:
            raise
        return None


def _previous_not_found(id: str) -> errors.ApiError:
    return errors.PREVIOUS_RESPONSE_NOT_FOUND(id=id)


def resolve_input(
    service: ServerState, input: str | Sequence[Item], key: str, history: History
) -> list[Item]:
    """Take a request's input in: resolved, checked against the past, and written out in full."""
    items = resolve_references(_list_input(input), service.item_lookup)
    check_request(history.context.coherence, items, service.item_lookup)
    check_encrypted_content(items, service.cipher.decrypt)
    return normalize_items(items, key)


def _list_input(input: str | Sequence[Item]) -> Sequence[Item]:
    return [{"role": "user", "content": input}] if isinstance(input, str) else input


async def precount_request(body: Body) -> None:
    """Count the texts of a long request in a thread, before they are counted on the loop."""

    def count() -> None:
        items = [item for item in _list_input(body.get("input") or ()) if not is_reference(item)]
        count_items(normalize_items(items, key=""))
        count_instruction_tokens(body)

    await precount((body.get("input"), body.get("instructions"), body.get("tools")), count)


def check_supported(service: ServerState, body: Body, *, on_socket: bool = False) -> None:
    """Refuse what this server cannot do."""
    if body.get("background"):
        if on_socket:
            raise errors.BACKGROUND_ON_SOCKET()
        if not should_store(service, body):
            raise errors.BACKGROUND_UNSTORED()


def should_store(service: ServerState, body: Body) -> bool:
    """Whether the response to this request is stored."""
    return body.get("store") is not False and not service.settings.zero_data_retention


def build_model_input(
    service: ServerState, body: Body, history: History, items: Sequence[Item]
) -> ModelInput:
    """Put together what a model sees: the past, unless a compaction stands for it, and the new."""
    settings = count_instruction_tokens(body)
    if has_compaction(items):
        seen = service.expand_items(slice_from_compaction(items))
        return ModelInput(seen, settings + count_items(seen))
    context = truncate_history(history.context)
    new = count_items(items)
    return ModelInput([*context.list_model_items(), *items], settings + context.tokens + new, new)


def count_instruction_tokens(body: Body) -> int:
    """Count the tokens of what is sent afresh with every request: instructions and tools."""
    instructions, tools = body.get("instructions"), body.get("tools")
    tokens = count_text(instructions) if isinstance(instructions, str) else 0
    return tokens + (count_json(tools) if tools else 0)


def truncate_to_window(model_input: ModelInput, body: Body, window: int) -> ModelInput:
    """Fit a view into a model's window: drop the oldest exchanges where the request allows it."""
    if model_input.tokens <= window:
        return model_input
    if body.get("truncation") != "auto":
        raise errors.CONTEXT_TOO_LONG()
    items, tokens = list(model_input.items), model_input.tokens
    while tokens > window:
        start = _find_second_exchange(items)
        if start is None:
            raise errors.CONTEXT_TOO_LONG()
        tokens -= count_items(items[:start])
        items = items[start:]
    return ModelInput(items, tokens)


def _find_second_exchange(items: Sequence[Item]) -> int | None:
    for index in range(1, find_newest_exchange(items) + 1):
        if items[index].get("role") == "user":
            return index
    return None


async def add_summary(draft: ResponseDraft) -> ResponseDraft:
    """Let the model sum up what a compaction leaves out, where it can."""
    made, asked = draft.compacted, draft.prompt.ask
    if made is None or not made.omitted_items:
        return draft
    summary = await draft.model.summarise(made.omitted_items)
    if not summary:
        return draft
    told = replace(made, summary=summary)
    # The note comes first, unless it had to go to make room.
    noted = list(asked.items[:1]) == made.items[:1]
    items = [*told.items[:1], *asked.items[1:]] if noted else asked.items
    prompt = replace(draft.prompt, ask=replace(asked, items=items))
    return replace(draft, compacted=told, prompt=prompt)


def _apply_compaction(model_input: ModelInput, compacted: CompactedContext | None) -> ModelInput:
    if compacted is None:
        return model_input
    items = compacted.items
    return ModelInput(items, count_items(items))


def _compact_if_needed(
    body: Body, model_input: ModelInput, window: int, *, triggered: bool
) -> CompactedContext | None:
    """Decide whether this response compacts its context, and what it keeps if so."""
    if triggered:
        return compact(model_input.items[:-1], model_input.tokens // 2)
    for entry in body.get("context_management") or ():
        threshold = entry.get("compact_threshold") or window
        if model_input.tokens > threshold:
            return compact(model_input.items, threshold // 2)
    return None


def _count_cached_tokens(history_tokens: int, input_tokens: int) -> int:
    return (
        min(history_tokens, input_tokens)
        if history_tokens >= response_object.MIN_CACHED_TOKENS
        else 0
    )


def build_ask(body: Body, items: Sequence[Item]) -> PracticeRequest:
    """Say what is asked of a model by this request and these items."""
    text: Body = body.get("text") or {}
    choice = body.get("tool_choice")
    return PracticeRequest(
        items=items,
        instructions=body.get("instructions"),
        tools=body.get("tools") or (),
        tool_choice="auto" if choice is None else choice,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        text_format=text.get("format"),
        reasoning=body.get("reasoning"),
    )
