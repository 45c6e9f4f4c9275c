"""The items that a server stores: conversation objects, and audits, which compare them with a Turn.

A conversation object can change independently: another client, another line of history or a retry may add to it. So a
request claims the object of its Turn (``evidence.object_claims``), and after each answer the end of the object must
be the previous last item, the items that were sent, and those of the answer.

An audit shows what a server has *stored*. It does not show what the server passes to the model: a server with
a limit on the length of a chain lists every item and omits the oldest from the prompt. Token accounting
(``kedge.evidence.tokens``) detects that.

Servers differ in what they list as the input of a chained response: all of it, or only what was sent
with that request. Both are handled: where the list is short, the rest is fetched from the parent. Where
the server's memory begins with a compaction, items from before the compaction are not compared, because
the model does not read them. The context of a response in a conversation object is all of the object.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from math import inf
from typing import Any, Protocol, TypeVar, cast

import msgspec
from anyio import current_time, move_on_after, sleep

from kedge._internal.display import pluralize
from kedge._internal.urls import quote_segment
from kedge._internal.wait_policy import WaitPolicy
from kedge.engines.heal_rules import OBJECT_LOCKED
from kedge.errors import EngineError, InvalidTurn, KedgeError, RequestRefused, ServerFailed
from kedge.evidence.object_claims import OBJECT_CLAIMS, Claim, ObjectStore, UnusedObject
from kedge.observe import get_logger
from kedge.planning import AnchorRecord, RequestPlan
from kedge.planning.anchors import get_conversation_id
from kedge.planning.digests import is_compaction, is_copy
from kedge.turns import Block, ReasoningBlock, ToolResultBlock, UserBlock, block_from_item

LOCK_SECONDS = 10.0
"""Seconds for which a request waits for an object that another request uses; then it uses a new one."""
LOCK_WAITS = WaitPolicy(
    "a request that was rejected because another one uses its conversation object",
    first=0.1,
    longest=1.0,
)
PAUSE_SECONDS = 10.0
"""Seconds after an answer from which the end of the object is compared before a stream, too."""
DELETE_SECONDS = 10.0
"""Seconds for which unused objects are deleted at a server."""
MAX_DELETED = 1_000
"""The maximum number of objects that are deleted at once."""
PAGE_SIZE = 100
"""The maximum number of items that a server lists at once."""

log = get_logger("kedge.engines.stored_items")
T = TypeVar("T")


class JsonSource(Protocol):
    """Fetches JSON objects from a server."""

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request, with ``json`` as its body, and return the object of the response."""
        ...


class ConversationObjects:
    """The conversation objects of one server.

    Args:
        transport: The connection to the server.
        scope: The provider, endpoint and account.
        get_store: Returns the store that processes share, if there is one.
    """

    def __init__(
        self, transport: JsonSource, scope: str, get_store: Callable[[], object | None]
    ) -> None:
        self._transport = transport
        self._scope = scope
        self._get_store = get_store
        self.claims = OBJECT_CLAIMS
        """The claims of this process."""

    async def create(self) -> str:
        """Create an empty object, and claim it."""
        try:
            created = await self._transport.request_json("post", "/conversations", json={})
        except RequestRefused as error:
            if error.status == 404:
                error.message = "this server has no conversation objects; use another mode"
            raise
        if not isinstance(created.get("id"), str):
            raise ServerFailed("the server returned a conversation object without an id")
        await self.claim(created["id"], "")
        return created["id"]

    def is_taken(self, plan: RequestPlan) -> bool:
        """Return whether another line of history continues the object of a plan."""
        return self.claims.find(self._scope, plan.conversation_id, plan.anchor_id) == "taken"

    async def is_changed(self, plan: RequestPlan, now: float) -> bool:
        """Return whether others have added to the claimed object of a plan during a pause in the conversation.

        A stream is shown before the check after the answer, so a change that can be found earlier is worth a request.
        """
        anchor = plan.anchor
        if anchor is None or not plan.conversation_id:
            return False
        if now - anchor.created_at < PAUSE_SECONDS:
            return False
        return await self.check_end(plan, plan.conversation_id, complete=False) is False

    async def claim(self, object_id: str, last: str) -> Claim:
        """Claim an object that ends with the response ``last``, in this process and in the store."""
        claims = self.claims
        store = self._get_store()
        local_claim = claims.claim(self._scope, object_id, last)
        if local_claim == "taken" or not isinstance(store, ObjectStore):
            return local_claim
        try:
            stored = await store.claim_object(self._scope, object_id, last, owner=claims.owner)
        except KedgeError as error:
            log.warning("a conversation object was not claimed in the store: %s", error)
            return "unknown"
        if stored == "unknown":
            return local_claim
        return stored

    async def release(self, object_id: str, last: str) -> None:
        """Record the last response in an object, so that its line of history can continue it."""
        claims = self.claims
        store = self._get_store()
        if isinstance(store, ObjectStore):
            try:
                await store.release_object(self._scope, object_id, last, owner=claims.owner)
            except KedgeError as error:
                log.warning("a conversation object was not released in the store: %s", error)
        claims.release(self._scope, object_id, last)

    async def delete_unused(
        self, store: ObjectStore, seconds: float = DELETE_SECONDS
    ) -> dict[UnusedObject, str]:
        """Delete the objects of this server that no line of history in a store continues.

        Args:
            store: The store for whose conversations the objects were made.
            seconds: The time limit; what is left then is deleted by the next call.

        Returns:
            The objects, and why they were not deleted, or an empty string. One that the server no longer has counts
            as deleted. The store lists the others until they are deleted.
        """
        unused = await store.take_unused_objects(self._scope, MAX_DELETED)
        problems = dict.fromkeys(unused, f"the server did not delete it within {seconds:g} seconds")
        with move_on_after(seconds):
            for item in unused:
                problems[item] = await self._delete(item)
                if not problems[item]:
                    await store.delete_object(item)
        return problems

    async def _delete(self, item: UnusedObject) -> str:
        """Delete an object at the server; return why it still exists, or an empty string."""
        try:
            path = f"/conversations/{quote_segment(item.id)}"
            await self._transport.request_json("delete", path)
        except EngineError as error:
            if not _is_missing(error):
                return str(error)
        return ""

    async def send(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request to an object; wait while the server says that another request uses the object."""
        deadline = current_time() + LOCK_SECONDS
        pauses = LOCK_WAITS.pauses()
        while True:
            pause = next(pauses)
            try:
                return await send()
            except RequestRefused as error:
                if error.code != OBJECT_LOCKED or current_time() + pause > deadline:
                    raise
            await sleep(pause)

    async def check_end(
        self,
        plan: RequestPlan,
        object_id: str,
        added: Sequence[Block] = (),
        *,
        complete: bool,
    ) -> bool | None:
        """Return whether an object ends as expected; None if the server did not say.

        Args:
            plan: The plan of the request.
            object_id: The object.
            added: The input of the request and the answer, if the server was to add them.
            complete: Whether all items are compared, and not only the end of the object.
        """
        earlier = _list_earlier(plan, complete=complete)
        expected = [*earlier, *(each for each in added if not isinstance(each, ReasoningBlock))]
        # One more than expected shows that there are no others.
        limit = min(len(earlier) + len(added) + complete, PAGE_SIZE)
        try:
            listed = await _list_newest(self._transport, object_id, len(expected) + complete, limit)
        except (InvalidTurn, KeyError, TypeError):
            return False
        except EngineError as error:
            log.warning("the end of a conversation object cannot be checked: %s", error)
            if _is_missing(error):
                return False
            return None
        if len(listed) < len(expected) or (complete and len(listed) > len(expected)):
            return False
        pairs = zip(expected, reversed(listed[: len(expected)]), strict=True)
        # Earlier outputs that were sent again to a new object have other ids there, except for the last response.
        return all(
            _is_same_item(ours, theirs, has_id=index >= len(earlier) - 1)
            for index, (ours, theirs) in enumerate(pairs)
        )


async def _list_pages(
    transport: JsonSource, path: str, order: str, limit: int = PAGE_SIZE
) -> AsyncGenerator[list[Mapping[str, Any]]]:
    """Yield the pages of a list of items; ``limit`` is the size of the first one."""
    after: dict[str, str] = {}
    while True:
        page = await transport.request_json("get", path, order=order, limit=limit, **after)
        items = cast("list[Mapping[str, Any]]", page["data"] or [])
        yield items
        if not page.get("has_more") or not items:
            return
        last = {"after": str(page.get("last_id") or items[-1].get("id"))}
        if last == after:  # a server without paging
            return
        after = last
        limit = PAGE_SIZE


def _read_blocks(items: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Return items as blocks, without reasoning."""
    return [block for block in map(block_from_item, items) if not isinstance(block, ReasoningBlock)]


async def _list_newest(
    transport: JsonSource, object_id: str, wanted: float = inf, limit: int = PAGE_SIZE
) -> list[Block]:
    """Return the newest items of an object without reasoning, the newest first.

    Args:
        transport: The connection to the server.
        object_id: The object.
        wanted: How many items are needed, all by default; more may be returned.
        limit: How many to request at once.
    """
    blocks: list[Block] = []
    path = f"/conversations/{quote_segment(object_id)}/items"
    async with aclosing(_list_pages(transport, path, "desc", limit)) as pages:
        async for items in pages:
            blocks += _read_blocks(items)
            if len(blocks) >= wanted:
                break
    return blocks


def _list_earlier(plan: RequestPlan, *, complete: bool) -> Sequence[Block]:
    """Return the blocks that the object of a plan should have before the request: all, or the last one."""
    if plan.anchor is None:
        return []
    context = plan.source[plan.start - plan.body_start : plan.start]
    blocks = [block for block in context if not isinstance(block, ReasoningBlock)]
    if not complete:
        return blocks[-1:]
    return blocks


def _is_same_item(ours: Block, theirs: Block, *, has_id: bool) -> bool:
    """Return whether an item is the expected one: by the id of an output, or by its content."""
    if has_id and ours.response_id and ours.item_id and theirs.item_id:
        return ours.item_id == theirs.item_id
    if is_copy(ours, theirs):
        return True
    # Servers list images and files in other forms than they were sent in.
    if isinstance(ours, UserBlock | ToolResultBlock) and isinstance(theirs, type(ours)):
        return ours.text == theirs.text and len(ours.parts) == len(theirs.parts)
    return False


MAX_ANCESTORS = 1_000


class Audit(msgspec.Struct, frozen=True):
    """The result of an audit.

    ``agrees`` is ``None`` if there was nothing to compare or the server did not return its items.
    """

    agrees: bool | None
    response_id: str = ""
    checked: int = 0
    """How many blocks were compared, newest first."""
    difference: str = ""

    def __str__(self) -> str:
        if self.agrees is None:
            return f"not verified: {self.difference}"
        if self.agrees:
            blocks = pluralize(self.checked, "block")
            return f"{self.response_id}: the server stores the same {blocks}"
        return f"{self.response_id}: {self.difference}"


async def audit_blocks(
    transport: JsonSource,
    blocks: Sequence[Block],
    anchor: AnchorRecord,
    *,
    lists_items: bool = False,
    normalize: Callable[[Block], Block] = lambda block: block,
) -> Audit:
    """Compare the items that the server stores for an anchor with blocks that begin with its context.

    Args:
        transport: The connection to the server.
        blocks: The conversation, without a leading system text that is sent with every request.
        anchor: The record of the response.
        lists_items: Whether this server is known to list stored items. Then, and after a first answer
            within this audit, a response that is not found counts as a difference.
        normalize: Applied to the blocks of the server before they are compared.
    """
    local = [block for block in blocks if not isinstance(block, ReasoningBlock)]
    local = local[anchor.barrier or 0 : anchor.block_count]
    checked = 0
    response_id = anchor.response_id
    object_id = get_conversation_id(anchor.scope)
    for _ in range(MAX_ANCESTORS):
        try:
            remote, response_id = await _fetch_context(transport, response_id, object_id)
        except (EngineError, InvalidTurn, KeyError, TypeError) as error:
            if _is_missing(error) and (lists_items or checked):
                missing = f"the server no longer has {response_id}"
                return Audit(False, anchor.response_id, checked, missing)
            detail = f"the server did not list what it stores ({error})"
            if _is_missing(error):
                detail = "the server no longer has this response, or does not list stored responses"
            return Audit(None, anchor.response_id, checked, detail)
        if anchor.barrier is not None:
            starts = [at for at, block in enumerate(remote) if is_compaction(block)]
            remote = remote[max(starts, default=0) :]
        difference = _find_difference(local, [normalize(block) for block in remote])
        if difference:
            return Audit(False, anchor.response_id, checked, difference)
        checked += len(remote)
        local = local[: len(local) - len(remote)]
        if not local:
            return Audit(True, anchor.response_id, checked)
        if not response_id or not remote:
            detail = f"the server stores none of the first {len(local)} blocks"
            return Audit(False, anchor.response_id, checked, detail)
    return Audit(None, anchor.response_id, checked, "the chain is too long to check")


def _is_missing(error: Exception) -> bool:
    return isinstance(error, EngineError) and error.status in (404, 410)


async def _fetch_context(
    transport: JsonSource, response_id: str, object_id: str
) -> tuple[list[Block], str]:
    """Return the blocks that the server lists for a response, and the id of its parent.

    The context of a response in a conversation object is the object.
    """
    if object_id:
        return (await _list_newest(transport, object_id))[::-1], ""
    path = f"/responses/{quote_segment(response_id)}"
    response = await transport.request_json("get", path)
    pages = [items async for items in _list_pages(transport, f"{path}/input_items", "asc")]
    stored = _read_blocks(chain(*pages, response["output"]))
    return stored, response.get("previous_response_id") or ""


def _find_difference(local: Sequence[Block], remote: Sequence[Block]) -> str:
    """Return the difference between the end of the local blocks and the stored ones; empty if they agree."""
    if len(remote) > len(local):
        return f"the server stores {len(remote)} blocks where the Turn has {len(local)}"
    start = len(local) - len(remote)
    for index, (ours, theirs) in enumerate(zip(local[start:], remote, strict=True), start + 1):
        if not is_copy(ours, theirs):
            return f"block {index} differs from the stored one ({ours.kind}, {theirs.kind})"
    return ""
