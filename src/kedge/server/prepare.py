"""Prepare a response: resolve the references of a valid request, and build the input of the model.

The checks run in the documented order (``docs/server.md``). Nothing is written to the database.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from kedge._internal.json_text import decode, encode
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import MANY_ITEMS, compute
from kedge.server import (
    coherence,
    encrypted_content,
    errors,
    object_forms,
    prompt_cache,
    token_counting,
)
from kedge.server.encrypted_content import CompactedContext
from kedge.server.models import Model, ModelUsage, Prompt
from kedge.server.object_forms import Item
from kedge.server.practice_model import PracticeRequest
from kedge.server.schema import requests
from kedge.server.state import ServerState
from kedge.server.storage import context as contexts
from kedge.server.storage.context import Context, LaneMemory
from kedge.server.storage.items import StoredItems, has_compaction
from kedge.store.database.responses import slice_from_compaction

if TYPE_CHECKING:
    from kedge.server.storage.postgres import ClaimedResponse

Body = Mapping[str, Any]

CHAINABLE_STATUSES = frozenset({"completed", "incomplete"})
"""Statuses of responses that can be continued."""


class History(NamedTuple):
    """The history that a request continues: a context, and the node at its end.

    A history that is ``in_memory`` has no node: only its connection has it, and a stored response that
    continues it must store all of it.
    """

    context: Context
    node: int | None = None
    conversation: str | None = None
    in_memory: bool = False


EMPTY_HISTORY = History(contexts.EMPTY_CONTEXT)
"""The history of a request that continues nothing."""


class ModelInput(NamedTuple):
    """The items that a model sees, their tokens, and the tokens of each new item among them."""

    items: Sequence[Item]
    tokens: int
    new_counts: tuple[int, ...] = ()


class ResponseDraft(NamedTuple):
    """A prepared response.

    ``input`` has the items of the request itself, ``input_json`` the items that are stored with the response, ``usage``
    the tokens of the request. ``compacted`` is set if this response compacts its context, and ``skip_model`` if no
    model is run.
    """

    key: str
    request_fields: Mapping[str, Any]
    history: History
    input: list[Item]
    new_tokens: int
    usage: ModelUsage
    store: bool
    prompt: Prompt
    compacted: CompactedContext | None
    skip_model: bool
    model: Model
    input_json: bytes = b""
    idempotency_key: str | None = None

    @property
    def is_large(self) -> bool:
        """Whether storing the response takes more than some milliseconds."""
        return len(self.input_json) > LARGE_BYTES


class ResolvedRequest(NamedTuple):
    """A request whose references are resolved, and whose items fit the history that it continues."""

    key: str
    history: History
    items: Sequence[Item]

    @property
    def is_long(self) -> bool:
        """Whether a pass over the complete context takes more than some milliseconds."""
        return self.history.context.length + len(self.items) > MANY_ITEMS


def resolve_request(
    service: ServerState,
    body: Body,
    make_key: Callable[[], str],
    unstored: LaneMemory | None = None,
    *,
    needs_input: bool = True,
) -> ResolvedRequest:
    """Read what a valid request refers to, or raise the first ApiError. Nothing is written to the database.

    Args:
        service: The server.
        body: The body of the request.
        make_key: Returns the key from which ids of items are derived.
        unstored: The unstored responses of the request's connection, if it is a WebSocket.
        needs_input: Whether a request with neither input nor anything to continue is rejected.
    """
    history = find_history(service, body, unstored)
    if needs_input:
        requests.check_not_empty(body)
    key = make_key()
    input_items = object_forms.list_input(body.get("input") or [])
    stored = StoredItems(service.nodes)
    items = coherence.resolve_references(input_items, stored)
    coherence.check_request(history.context.coherence, items, stored)
    return ResolvedRequest(key, history, items)


def normalize_input(service: ServerState, resolved: ResolvedRequest) -> list[Item]:
    """Return the items of a request in full form, or raise the ApiError of encrypted content."""
    coherence.check_encrypted_content(resolved.items, service.cipher.decrypt)
    return object_forms.normalize_items(resolved.items, resolved.key)


def count_input(
    service: ServerState, body: Body, resolved: ResolvedRequest
) -> tuple[list[Item], ModelInput]:
    """Return the items of a request in full form, and the input of a model."""
    items = normalize_input(service, resolved)
    return items, build_model_input(service, body, resolved.history, items)


def build_draft(
    service: ServerState,
    body: Body,
    resolved: ResolvedRequest,
    *,
    on_socket: bool = False,
    idempotency_key: str | None = None,
) -> ResponseDraft:
    """Prepare the response to a resolved request, or raise the first ApiError. The database is not read."""
    items = normalize_input(service, resolved)
    history = resolved.history
    draft = _build_draft(service, body, resolved.key, history, items, on_socket=on_socket)
    if not draft.store:
        return draft
    stored_items = items
    if history.in_memory:
        stored_items = [*history.context.list_items(), *items]
    return draft._replace(input_json=encode(stored_items), idempotency_key=idempotency_key)


def prepare_claimed(service: ServerState, claimed: "ClaimedResponse") -> ResponseDraft:
    """Prepare a background response that another server did not finish, with the same result as there.

    Raises:
        ApiError: If it cannot be generated any more, for example because its model is not served here.
        LookupError: If the history that it continues is lost.
    """
    context = service.nodes.load_context(claimed.parent)
    history = History(context, claimed.parent, claimed.conversation)
    items: list[Item] = decode(claimed.input)
    draft = _build_draft(service, decode(claimed.body), claimed.key, history, items)
    fields = decode(claimed.request_json)
    return draft._replace(request_fields=fields, input_json=claimed.input)


async def prepare_stateless(
    service: ServerState, body: Body, *, is_long: bool, automatic_cache: bool = False
) -> ResponseDraft:
    """Prepare the response to a request of a stateless API, which was converted to one of the Responses API.

    Args:
        service: The server.
        body: The converted request.
        is_long: Whether a pass over the request takes more than some milliseconds.
        automatic_cache: Whether its prompt is cached without breakpoints.
    """
    await precount_request(body, is_long=is_long)
    key = object_forms.new_unstored_key()

    def build() -> ResponseDraft:
        items = object_forms.normalize_items(body["input"], key)
        return _build_draft(
            service, body, key, EMPTY_HISTORY, items, automatic_cache=automatic_cache
        )

    return await compute(build, is_long=is_long)


def _build_draft(
    service: ServerState,
    body: Body,
    key: str,
    history: History,
    items: list[Item],
    *,
    on_socket: bool = False,
    automatic_cache: bool = True,
) -> ResponseDraft:
    model_input = build_model_input(service, body, history, items)
    model = service.find_model(body["model"])
    store = body.get("store") is not False and not service.settings.zero_data_retention
    _check_background(body, is_stored=store, on_socket=on_socket)
    requests.check_tool_choice(body, model_input.items)
    if not service.ignores_unknown:
        requests.check_json_mentioned(body, model_input.items)

    is_triggered = bool(items) and items[-1]["type"] == encrypted_content.TRIGGER_TYPE
    compacted = _compact_if_needed(body, model_input, model.window, is_triggered=is_triggered)
    prompt_input = model_input
    if compacted is not None:
        service.cipher.require("input" if is_triggered else "context_management")
        prompt_input = ModelInput(compacted.items, token_counting.count_items(compacted.items))
    if prompt_input.tokens > model.window:
        prompt_input = truncate_to_window(prompt_input, body, model.window)
    cached_tokens = 0
    # A prompt that was compacted or truncated has another prefix.
    is_prefix_known = prompt_input is model_input and not has_compaction(items)
    is_long_enough = prompt_input.tokens >= prompt_cache.MIN_CACHED_TOKENS
    if automatic_cache and is_prefix_known and is_long_enough:
        cached_tokens = read_prompt_cache(service, body, history.context, items, prompt_input)

    # The usage of a response that compacts its context counts all of it.
    counted_input = prompt_input if compacted is None else model_input
    created_at = int(service.clock())
    return ResponseDraft(
        key=key,
        request_fields=object_forms.build_request_fields(key, created_at, body, store=store),
        history=history,
        input=items,
        new_tokens=sum(model_input.new_counts),
        usage=ModelUsage(counted_input.tokens, 0, cached_tokens),
        store=store,
        prompt=_build_prompt(service, body, prompt_input.items),
        compacted=compacted,
        skip_model=is_triggered or body.get("generate") is False,
        model=model,
    )


def _check_background(body: Body, *, is_stored: bool, on_socket: bool) -> None:
    """Reject a background response that nobody could read later."""
    if not body.get("background"):
        return
    if on_socket:
        raise errors.BACKGROUND_ON_SOCKET()
    if not is_stored:
        raise errors.BACKGROUND_UNSTORED()


def reads_history(service: ServerState, body: Body, unstored: LaneMemory | None = None) -> bool:
    """Return whether the history of a request, of any size, may have to be read from the database."""
    previous = body.get("previous_response_id")
    if previous is None:
        return body.get("conversation") is not None
    if unstored is not None and unstored.memory.find(previous) is not None:
        return False
    return not service.nodes.is_cached(previous)


def find_history(service: ServerState, body: Body, unstored: LaneMemory | None = None) -> History:
    """Return the context that a request continues."""
    conversation = body.get("conversation")
    previous_response_id = body.get("previous_response_id")
    if conversation is not None and previous_response_id is not None:
        raise errors.MUTUALLY_EXCLUSIVE()
    history = EMPTY_HISTORY
    if conversation is not None:
        id: str = conversation if isinstance(conversation, str) else conversation["id"]
        history = _find_conversation_history(service, id)
    if body.get("prompt") is not None:  # this server has no stored prompts
        raise errors.PROMPT_NOT_FOUND(id=body["prompt"]["id"])
    if previous_response_id is not None:
        history = _find_response_history(service, previous_response_id, unstored)
    return history


def _find_conversation_history(service: ServerState, id: str) -> History:
    if service.settings.zero_data_retention:
        raise errors.CONVERSATION_ZERO_DATA_RETENTION()
    conversation = service.conversations.find(id)
    if conversation is not None:
        node = conversation.node
        with suppress(LookupError):  # another process of a shared database has just deleted it
            return History(service.nodes.load_context(node), node, conversation.id)
    raise errors.CONVERSATION_NOT_FOUND(id=id)


def _find_response_history(service: ServerState, id: str, unstored: LaneMemory | None) -> History:
    if unstored is not None:
        context = unstored.memory.find(id)
        if context is not None:
            return History(context, in_memory=True)
    if service.settings.zero_data_retention:
        if unstored is None:
            raise errors.ZERO_DATA_RETENTION()
        # On a WebSocket this is not an error of the client: it may have been evicted just now.
        raise errors.PREVIOUS_RESPONSE_NOT_FOUND(id=id)
    response = service.responses.find(id)
    if response is not None:
        node, status, _ = response
        if status not in CHAINABLE_STATUSES:
            raise errors.PREVIOUS_RESPONSE_UNFINISHED(id=id, status=status)
        with suppress(LookupError):  # as above
            return History(service.nodes.load_context(node), node)
    raise errors.PREVIOUS_RESPONSE_NOT_FOUND(id=id)


async def precount_request(body: Body, *, is_long: bool) -> None:
    """Count the texts of a long request in a thread, before they are counted on the loop."""
    input = body.get("input") or body.get("items") or ()

    def count() -> None:
        if isinstance(input, str):
            token_counting.count_text(input)
        else:
            items = [item for item in input if not coherence.is_reference(item)]
            token_counting.count_items(object_forms.normalize_items(items, key=""))
        count_instruction_tokens(body)

    texts = (input, body.get("instructions"), body.get("tools"))
    if is_long or token_counting.measure_texts(texts) >= token_counting.MIN_THREAD_CHARS:
        await token_counting.precount(count)


def build_model_input(
    service: ServerState, body: Body, history: History, items: Sequence[Item]
) -> ModelInput:
    """Return the input of a model: the history, unless a compaction replaces it, and the new items."""
    instruction_tokens = count_instruction_tokens(body)
    if has_compaction(items):
        expanded = service.expand_items(slice_from_compaction(items))
        return ModelInput(expanded, instruction_tokens + token_counting.count_items(expanded))
    context = contexts.truncate_history(history.context)
    counts = tuple(map(token_counting.count_item, items))
    tokens = instruction_tokens + context.tokens + sum(counts)
    return ModelInput(contexts.ContextItems(context, items), tokens, counts)


def count_instruction_tokens(body: Body) -> int:
    """Count the tokens of instructions and tools, which are sent with every request."""
    tokens = 0
    instructions = body.get("instructions")
    if isinstance(instructions, str):
        tokens += token_counting.count_text(instructions)
    tools = body.get("tools")
    if tools:
        tokens += token_counting.count_json(tools)
    return tokens


def truncate_to_window(model_input: ModelInput, body: Body, window: int) -> ModelInput:
    """Fit the input into the model's window by dropping the oldest exchanges, if the request allows it."""
    if body.get("truncation") != "auto":
        raise errors.CONTEXT_TOO_LONG()
    items = list(model_input.items)
    tokens = model_input.tokens
    for index in range(1, encrypted_content.find_newest_exchange(items) + 1):
        tokens -= token_counting.count_item(items[index - 1])
        if items[index].get("role") == "user" and tokens <= window:
            return ModelInput(items[index:], tokens)
    raise errors.CONTEXT_TOO_LONG()


async def summarize(model: Model, compacted: CompactedContext) -> CompactedContext:
    """Return a compaction with the model's summary of the items that it omits, if there are any."""
    if not compacted.omitted_items:
        return compacted
    return replace(compacted, summary=await model.summarize(compacted.omitted_items))


async def add_summary(draft: ResponseDraft, compacted: CompactedContext) -> ResponseDraft:
    """Add the model's summary of the items that a compaction omits, if the model writes one."""
    summarized = await summarize(draft.model, compacted)
    if not summarized.summary:
        return draft
    ask = draft.prompt.ask
    items = ask.items
    has_note = list(items[:1]) == compacted.items[:1]  # unless it was dropped to fit the window
    if has_note:
        items = [*summarized.items[:1], *items[1:]]
    prompt = replace(draft.prompt, ask=replace(ask, items=items))
    return draft._replace(compacted=summarized, prompt=prompt)


def _compact_if_needed(
    body: Body, model_input: ModelInput, window: int, *, is_triggered: bool
) -> CompactedContext | None:
    """Return the replacement of the context, if this response compacts it."""
    if is_triggered:
        return encrypted_content.compact(model_input.items[:-1], model_input.tokens // 2)
    for entry in body.get("context_management") or ():
        threshold = entry.get("compact_threshold") or window
        if model_input.tokens > threshold:
            return encrypted_content.compact(model_input.items, threshold // 2)
    return None


def read_prompt_cache(
    service: ServerState,
    body: Body,
    context: Context,
    items: Sequence[Item],
    model_input: ModelInput,
) -> int:
    """Cache a prompt automatically, and return the number of its tokens that were cached before."""
    context = contexts.truncate_history(context)
    settings_tokens = model_input.tokens - context.tokens - sum(model_input.new_counts)
    prefixes = prompt_cache.iter_prefixes(
        (prompt_cache.hash_prompt_settings(body), settings_tokens),
        context.iter_prefixes(),
        items,
        model_input.new_counts,
    )
    retention = body.get("prompt_cache_retention") or ""
    return service.prompt_cache.use_prompt(
        prefixes, prompt_cache.RETENTIONS.get(retention, prompt_cache.DEFAULT_LIFETIME)
    )


def _build_prompt(service: ServerState, body: Body, items: Sequence[Item]) -> Prompt:
    """Build the request to the model from the request body and the items of its input."""
    text: Body = body.get("text") or {}
    tool_choice = body.get("tool_choice")
    if tool_choice is None:
        tool_choice = "auto"
    ask = PracticeRequest(
        items=items,
        instructions=body.get("instructions"),
        tools=body.get("tools") or (),
        tool_choice=tool_choice,
        parallel_tool_calls=body.get("parallel_tool_calls") is not False,
        text_format=text.get("format"),
        reasoning=body.get("reasoning"),
        read_reasoning=service.read_reasoning,
    )
    return Prompt(
        ask=ask,
        body=body,
        stream=bool(body.get("stream")),
        max_tokens=body.get("max_output_tokens"),
        stop=body.get("stop", ()),  # of a stateless API
        decrypt_reasoning=service.decrypt_reasoning,
        keep_reasoning=service.cipher.is_available,
        namespace=service.namespace,
    )
