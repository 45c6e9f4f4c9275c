"""Conversation objects: create one, claim it for a request, and check its end after the answer.

An object can change independently: another client, another line of history or a retry may add to it. So a request
claims the object of its Turn (``kedge.memory.object_claims``), and after each answer the end of the object must be
the previous last item, the items that were sent, and those of the answer.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol, TypeVar, cast

from anyio import current_time, move_on_after, sleep

from kedge.engines.heal_rules import OBJECT_LOCKED
from kedge.errors import EngineError, InvalidTurn, KedgeError, RequestRefused, ServerFailed
from kedge.memory.object_claims import OBJECT_CLAIMS, Claim, ObjectStore, UnusedObject
from kedge.observe import get_logger
from kedge.planning import RequestPlan
from kedge.planning.canonical import is_copy
from kedge.security.urls import quote_segment
from kedge.turns import Block, ReasoningBlock, ToolResultBlock, Turn, UserBlock, block_from_item

LOCK_SECONDS = 10.0
"""Seconds for which a request waits for an object that another request uses; then it uses a new one."""
FIRST_DELAY = 0.1
MAX_DELAY = 1.0
"""Seconds between two attempts at an object that is in use: the first delay, and the maximum."""
PAUSE_SECONDS = 10.0
"""Seconds after an answer from which the end of the object is compared before a stream, too."""
DELETE_SECONDS = 10.0
"""Seconds for which unused objects are deleted at a server."""
MAX_DELETED = 1_000
"""The maximum number of objects that are deleted at once."""
PAGE_SIZE = 100
"""The maximum number of items that a server lists at once."""

log = get_logger("kedge.engines.conversation_objects")
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
        await self._claim(created["id"], "")
        return created["id"]

    def is_taken(self, plan: RequestPlan) -> bool:
        """Return whether another line of history continues the object of a plan."""
        last = plan.anchor.response_id if plan.anchor else ""
        return self.claims.find(self._scope, plan.conversation_id, last) == "taken"

    async def claim(self, plan: RequestPlan) -> Claim:
        """Claim the object of a plan, in this process and in the store."""
        return await self._claim(
            plan.conversation_id, plan.anchor.response_id if plan.anchor else ""
        )

    async def is_changed(self, plan: RequestPlan, now: float) -> bool:
        """Return whether others have added to the claimed object of a plan during a pause in the conversation.

        A stream is shown before the check after the answer, so a change that can be found earlier is worth a request.
        """
        if (
            not plan.conversation_id
            or not plan.anchor
            or now - plan.anchor.created_at < PAUSE_SECONDS
        ):
            return False
        last = list_earlier(plan, complete=False)
        return await self.check_end(plan.conversation_id, last, (), (), complete=False) is False

    async def _claim(self, object_id: str, last: str) -> Claim:
        claims, store = self.claims, self._get_store()
        claim = claims.claim(self._scope, object_id, last)
        if claim == "taken" or not isinstance(store, ObjectStore):
            return claim
        try:
            stored = await store.claim_object(self._scope, object_id, last, owner=claims.owner)
        except KedgeError as error:
            log.warning("a conversation object was not claimed in the store: %s", error)
            return "unknown"
        return claim if stored == "unknown" else stored

    async def release(self, object_id: str, last: str) -> None:
        """Record the last response in an object, so that its line of history can continue it."""
        claims, store = self.claims, self._get_store()
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
            for each in unused:
                problems[each] = await self._delete(each.id)
                if not problems[each]:
                    await store.delete_object(each)
        return problems

    async def _delete(self, object_id: str) -> str:
        """Delete an object; return what went wrong."""
        try:
            path = f"/conversations/{quote_segment(object_id)}"
            await self._transport.request_json("delete", path)
        except EngineError as error:
            return "" if error.status in (404, 410) else str(error)
        return ""

    async def send(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request to an object; wait while the server says that another request uses the object."""
        delay, deadline = FIRST_DELAY, current_time() + LOCK_SECONDS
        while True:
            try:
                return await send()
            except RequestRefused as error:
                if error.code != OBJECT_LOCKED or current_time() + delay > deadline:
                    raise
            await sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    async def check_end(
        self,
        object_id: str,
        earlier: Sequence[Block],
        sent: Sequence[Mapping[str, Any]],
        received: Sequence[Block],
        *,
        complete: bool,
    ) -> bool | None:
        """Return whether an object ends as expected; None if the server did not say.

        Args:
            object_id: The object.
            earlier: What the object should have before the request: the last block, or all of them.
            sent: The input items of the request, if the server was to add them.
            received: The blocks of the answer, if the server was to add them.
            complete: Whether the object must have no other items.
        """
        window = [*map(block_from_item, sent), *received]
        expected = [*earlier, *(each for each in window if not isinstance(each, ReasoningBlock))]
        # One more than expected shows that there are no others.
        limit = min(len(earlier) + len(window) + complete, PAGE_SIZE)
        try:
            listed = await list_newest(self._transport, object_id, len(expected) + complete, limit)
        except InvalidTurn:
            return False
        except EngineError as error:
            log.warning("the end of a conversation object cannot be checked: %s", error)
            return False if error.status in (404, 410) else None
        if len(listed) < len(expected) or (complete and len(listed) > len(expected)):
            return False
        pairs = zip(expected, reversed(listed[: len(expected)]), strict=True)
        # Earlier outputs that were sent again to a new object have other ids there, except for the last response.
        return all(
            _is_same_item(ours, theirs, has_id=index >= len(earlier) - 1)
            for index, (ours, theirs) in enumerate(pairs)
        )


async def list_newest(
    transport: JsonSource, object_id: str, wanted: float = inf, limit: int = PAGE_SIZE
) -> list[Block]:
    """Return the newest items of an object without reasoning, the newest first.

    Args:
        transport: The connection to the server.
        object_id: The object.
        wanted: How many items are needed, all by default; more may be returned.
        limit: How many to request at once.
    """
    path = f"/conversations/{quote_segment(object_id)}/items"
    found: list[Block] = []
    after: dict[str, str] = {}
    while True:
        page = await transport.request_json("get", path, order="desc", limit=limit, **after)
        items = cast("list[Mapping[str, Any]]", page.get("data") or [])
        blocks = [block_from_item(item) for item in items]
        found += [block for block in blocks if not isinstance(block, ReasoningBlock)]
        last = {"after": str(page.get("last_id") or (items[-1].get("id") if items else ""))}
        if len(found) >= wanted or not page.get("has_more") or not items or last == after:
            return found
        after, limit = last, PAGE_SIZE


def list_earlier(plan: RequestPlan, *, complete: bool) -> list[Block]:
    """Return the blocks that the object of a plan should have before the request: all, or the last one."""
    if plan.anchor is None:
        return []
    lead = plan.source.lead if isinstance(plan.source, Turn) else 0
    blocks = plan.source[lead : plan.start]
    found: list[Block] = [block for block in blocks if not isinstance(block, ReasoningBlock)]
    return found if complete else found[-1:]


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
