"""Audits: fetch the items that a server stores for an anchor, and compare them with the Turn.

An audit shows what a server has *stored*. It does not show what the server passes to the model: a server with
a limit on the length of a chain lists every item and omits the oldest from the prompt. Token accounting
(``kedge.memory.tokens``) detects that.

Servers differ in what they list as the input of a chained response: all of it, or only what was sent
with that request. Both are handled: where the list is short, the rest is fetched from the parent. Where
the server's memory begins with a compaction, items from before the compaction are not compared, because
the model does not read them. The context of a response in a conversation object is all of the object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.engines.conversation_objects import PAGE_SIZE, JsonSource, list_newest
from kedge.errors import EngineError, InvalidTurn
from kedge.planning import AnchorRecord, RequestPlan
from kedge.planning.canonical import is_copy
from kedge.planning.digests import is_compaction
from kedge.planning.reusable_items import get_conversation_id
from kedge.security.urls import quote_segment
from kedge.text.display import pluralize
from kedge.turns import Block, ReasoningBlock, Turn, block_from_item

MAX_ANCESTORS = 1_000


@dataclass(frozen=True, slots=True)
class Audit:
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


async def audit(
    transport: JsonSource, turn: Turn, plan: RequestPlan, *, lists_items: bool = False
) -> Audit:
    """Compare the items that the server stores for the plan's anchor with the Turn.

    Args:
        transport: The connection to the server.
        turn: The Turn that the plan was made for.
        plan: A plan that is chained on an anchor.
        lists_items: Whether this server is known to list stored items. Then, and after a first answer
            within this audit, a response that is not found counts as a difference.
    """
    if plan.anchor is None:
        return Audit(None, difference="there is no anchor; everything would be sent")
    return await audit_blocks(transport, turn.body, plan.anchor, lists_items=lists_items)


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
        lists_items: As for `audit`.
        normalize: Applied to the blocks of the server before they are compared.
    """
    local = [block for block in blocks if not isinstance(block, ReasoningBlock)]
    local = local[anchor.barrier or 0 : anchor.block_count]
    checked, response_id = 0, anchor.response_id
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
            remote = _trim_to_compaction(remote)
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
        return (await list_newest(transport, object_id))[::-1], ""
    response = await transport.request_json("get", f"/responses/{quote_segment(response_id)}")
    items = [*await _fetch_input_items(transport, response_id), *response["output"]]
    blocks = [block_from_item(item) for item in items]
    stored: list[Block] = [block for block in blocks if not isinstance(block, ReasoningBlock)]
    return stored, response.get("previous_response_id") or ""


async def _fetch_input_items(transport: JsonSource, response_id: str) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = []
    after: dict[str, str] = {}
    path = f"/responses/{quote_segment(response_id)}/input_items"
    while True:
        page = await transport.request_json("get", path, order="asc", limit=PAGE_SIZE, **after)
        data = cast("list[Mapping[str, Any]]", page["data"])
        items += data
        if not page.get("has_more") or not data:
            return items
        last = {"after": page.get("last_id") or data[-1]["id"]}
        if last == after:  # a server without paging
            return items
        after = last


def _trim_to_compaction(blocks: list[Block]) -> list[Block]:
    start = max((at for at, block in enumerate(blocks) if is_compaction(block)), default=0)
    return blocks[start:]


def _find_difference(local: Sequence[Block], remote: Sequence[Block]) -> str:
    """Return the difference between the end of the local blocks and the stored ones; empty if they agree."""
    if len(remote) > len(local):
        return f"the server stores {len(remote)} blocks where the Turn has {len(local)}"
    start = len(local) - len(remote)
    for index, (ours, theirs) in enumerate(zip(local[start:], remote, strict=True), start + 1):
        if not is_copy(ours, theirs):
            return f"block {index} differs from the stored one ({ours.kind}, {theirs.kind})"
    return ""
