"""Store the new blocks of a Turn as a node of the tree, with the incidents, tool runs and bodies of its run."""

import json
import time
from collections.abc import Callable
from typing import TypedDict, Unpack

import msgspec
from msgspec.structs import replace

from kedge._internal.json_text import escape_surrogates
from kedge.engines.request_log import filter_json
from kedge.events import Event
from kedge.events.run import Healed, ModeChanged, RequestPlanned, ServerForgot, ToolFinished
from kedge.planning import AnchorRecord, get_state, set_state
from kedge.planning.anchor_changes import NO_CHANGES, AnchorChanges, compare_anchors
from kedge.planning.anchors import limit_expiry
from kedge.store import (
    ConversationRow,
    Incident,
    Node,
    RequestRecord,
    Store,
    StoredExchange,
    Telemetry,
    ToolRow,
)
from kedge.store.node_state import get_stored_data
from kedge.store.nodes import ResponseStored
from kedge.store.records import NO_TELEMETRY, NodeKind
from kedge.turns import Turn
from kedge.turns.content_filters import ContentFilters
from kedge.turns.turn import count_common_blocks, has_prefix

_INCIDENTS = {Healed: "healed", ServerForgot: "forgot", ModeChanged: "mode_changed"}
WITHHELD_BODY = b"[not stored: guard rules apply, and this body is a stream]"


class NodeOptions(TypedDict, total=False):
    """The further keyword arguments of ``Store.append`` for a node of a run."""

    response: RequestRecord | None
    telemetry: Telemetry
    head: int | None
    key: str
    replaces_node: int


class Checkpoint(msgspec.Struct):
    """A node of the tree, and the Turn at that node."""

    store: Store
    row: ConversationRow
    node: Node
    turn: Turn
    stored_record: RequestRecord | None = None
    """The record that another process stored first, of the response in the background that the last node replaces."""

    async def save(
        self,
        turn: Turn,
        kind: NodeKind,
        *,
        anchor: AnchorRecord | None = None,
        **options: Unpack[NodeOptions],
    ) -> Node:
        """Add a node with the changes in the Turn, and move to it.

        Args:
            turn: The Turn at the new node.
            kind: The kind of the node.
            anchor: The record of the response that is stored with the node, as its engine made it.
            **options: The further options of ``Store.append``.
        """
        prefix_length = count_common_blocks(self.turn, turn)
        try:
            self.node = await self.store.append(
                self.row,
                self.node,
                turn[prefix_length:],
                kind=kind,
                kept=prefix_length,
                memory=get_state(turn),
                data=get_stored_data(turn),
                changes=self._compare_anchors(turn, kind, anchor),
                **options,
            )
        except ResponseStored as stored:
            await self._adopt(stored.node, options.get("head"))
        else:
            self.turn = turn
        return self.node

    def _compare_anchors(
        self, turn: Turn, kind: NodeKind, anchor: AnchorRecord | None
    ) -> AnchorChanges:
        """Return how the records of a Turn differ from those that the store has of its path."""
        if kind == "failed":  # beside the path; its response is no anchor
            return NO_CHANGES
        state = get_state(self.turn)
        if anchor is not None:
            state = state.with_anchor(anchor)
        return compare_anchors(state.anchors, turn)

    async def _adopt(self, node: Node, head: int | None) -> None:
        """Move to a node that another process has stored, and move the head there unless that process did."""
        self.node = node
        self.turn = (await self.store.load(self.row, node.id)).turn(self.row.id)
        self.stored_record = await self.store.newest_response(self.row, node.id)
        if head is not None and (await self.store.conversation(self.row)).head != node.id:
            await self.store.move_head(self.row, node, head=head)


def has_same_blocks(one: Turn, other: Turn) -> bool:
    """Return whether both Turns consist of the identical blocks."""
    return len(one) == len(other) and has_prefix(other, one)


def has_same_content(one: Turn, other: Turn) -> bool:
    """Return whether both Turns consist of the identical blocks, and have the same data and conversation state."""
    return has_same_blocks(one, other) and one.data == other.data


def limit_retention(turn: Turn, retention: float | None) -> Turn:
    """Return the Turn with anchors that expire after ``retention`` seconds at the latest."""
    if retention is None:
        return turn
    state = get_state(turn)
    expiries = [
        limit_expiry(anchor.created_at, anchor.expires_at, retention) for anchor in state.anchors
    ]
    if expiries == [anchor.expires_at for anchor in state.anchors]:
        return turn
    limited = tuple(
        replace(anchor, expires_at=expiry)
        for anchor, expiry in zip(state.anchors, expiries, strict=True)
    )
    return set_state(turn, replace(state, anchors=limited))


class RunRecorder(msgspec.Struct):
    """Collects the incidents, tool runs and bodies of one run."""

    clock: Callable[[], float] = time.time
    filters: ContentFilters = msgspec.field(default_factory=ContentFilters)
    recorded: Telemetry = NO_TELEMETRY
    _scope: str = ""

    def record_exchange(self, request: bytes, reply: bytes, status: int | None) -> None:
        """Record the bodies of a request and its reply, after the guards of the stack."""
        if self.filters:
            request = _filter_body(request, self.filters)
            reply = _filter_body(reply, self.filters)
        exchange = StoredExchange(request, reply, status, self.clock())
        self.recorded = replace(self.recorded, exchanges=(*self.recorded.exchanges, exchange))

    def record_event(self, event: Event) -> None:
        """Record an event."""
        match event:
            case RequestPlanned(plan):
                self._scope = plan.scope
            case Healed() | ServerForgot() | ModeChanged():
                reason = "usage" if isinstance(event, ServerForgot) else event.reason
                kind = _INCIDENTS[type(event)]
                incident = Incident(kind, reason, self._scope, self.clock())  # pyright: ignore[reportArgumentType]
                self.recorded = replace(
                    self.recorded, incidents=(*self.recorded.incidents, incident)
                )
            case ToolFinished():
                row = ToolRow(event.call.name, event.outcome, event.seconds, self.clock())
                self.recorded = replace(self.recorded, tools=(*self.recorded.tools, row))
            case _:
                pass

    def drain_telemetry(self) -> Telemetry:
        """Return the data recorded since the last call."""
        recorded = self.recorded
        self.recorded = NO_TELEMETRY
        return recorded


def _filter_body(body: bytes, filters: ContentFilters) -> bytes:
    """Return a JSON body with its texts filtered; any other body is withheld.

    The text of a stream is split into pieces, in which patterns cannot be found.
    """
    if not body:
        return body
    try:
        filtered = json.dumps(filter_json(json.loads(body), filters), ensure_ascii=False)
        return escape_surrogates(filtered).encode()
    except (ValueError, RecursionError):
        return WITHHELD_BODY
