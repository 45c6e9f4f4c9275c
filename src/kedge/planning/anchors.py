"""Anchor records: the properties of a stored response, whether it can be used, and how one is recorded.

Only a record can prove what a response remembers. It has the digest of the complete context of its response; if
the Turn has that digest at that length, the server's memory is a prefix of the Turn. The other fields of the
record show whether the response is still available on the server.

The conversation state of a Turn is its mode, the ids of the server's memory, and its anchor records. It is stored in
``turn.data`` and is part of the JSON form. It is a cache: a state that cannot be parsed is treated as empty, and costs
one full send.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import msgspec
from msgspec import structs
from msgspec.structs import force_setattr, replace
from typing_extensions import TypeIs

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_choice
from kedge.observe import get_logger
from kedge.planning.digests import PrefixIndex, derived_digests, get_prefix_index, prefix_digest
from kedge.turns import Block, Source, Turn
from kedge.turns.blocks import ENGINE
from kedge.turns.frozen_json import add_frozen, thaw
from kedge.turns.turn import check_turn, replace_data

if TYPE_CHECKING:
    from kedge.events import RequestRecord
    from kedge.planning.plan import RequestPlan

log = get_logger("kedge.planning")

UnusableStatus = Literal["no_id", "reused_id", "empty", "ambiguous"]
"""Why a complete response can never be continued, although the server may have it."""
UNUSABLE_STATUSES: tuple[UnusableStatus, ...] = get_args(UnusableStatus)
Status = Literal[
    "completed", "incomplete", "running", "unknown", "failed", "cancelled", "lost", UnusableStatus
]
"""The status of an anchor's response; ``running`` means that the server generates it in the background, ``unknown``
that a server or gateway did not find it since and did not say that it is gone, ``lost`` that the server no longer
has it. The record of an unusable response is only a reason."""
WAITING_STATUSES: tuple[Literal["running"], Literal["unknown"]] = ("running", "unknown")
"""The statuses of a response in the background that has not ended, as far as is known."""
Reason = Literal[
    "scope",
    "incomplete",
    "unstored",
    "expired",
    "too_deep",
    "split",
    "changed",
    "unproven",
    "lost",
    "untrusted",
    "empty_input",
    "taken",
    UnusableStatus,
]
"""The reason why a candidate is not used as the anchor of a request."""

REASONS: dict[Reason, str] = {
    "scope": "it belongs to another provider, endpoint, account or conversation object",
    "incomplete": "it was never completed",
    "unstored": "the server did not store it",
    "expired": "the server no longer stores it, or is about to drop it",
    "too_deep": "its chain is longer than this server is known to remember",
    "split": "its blocks are no longer contiguous",
    "changed": "the conversation before or in it was edited since",
    "unproven": "there is no record of what it remembers",
    "lost": "the server no longer has it",
    "untrusted": "it cannot be checked whether this server remembers it",
    "empty_input": "the server rejects a request that only names it, without new blocks",
    "taken": "another line of history continues its conversation object, or may have done so",
    "no_id": "it came without an id",
    "reused_id": "the server had given its id to an earlier answer",
    "empty": "it has no content",
    "ambiguous": "its parts contradict each other, so it is not known what the server stored",
}
"""A description of every reason to reject a candidate."""

DEFAULT_RETENTION = 30 * 24 * 3600.0
"""Seconds for which a provider stores a response, unless configured otherwise."""
EXPIRY_MARGIN = 3600.0
"""Seconds before its expiry from which a response is no longer used."""


class TokenCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A server's token counts for one response: the base for judging a request chained on it.

    ``output`` is our count of the visible text that the response adds to the context. ``reasoning`` are tokens that
    ``input`` may contain and that the server may drop at the next user message; ``own_reasoning`` is not 0 if this
    response has such tokens. ``settings`` identifies the parameters that change a count.
    """

    input: int
    cached: int
    output: int
    reasoning: int
    own_reasoning: int
    settings: int


_decode_counts = msgspec.json.Decoder(TokenCounts).decode


def decode_token_counts(text: str | None) -> TokenCounts | None:
    """Return the counts in the text of a JSON array; malformed ones count as missing, which only delays a verdict."""
    if not text:
        return None
    try:
        return _decode_counts(text)
    except ValueError:
        return None


class AnchorRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The properties of one stored response, in the state of a chat an array.

    Nothing is checked, because a record with wrong values matches no Turn.

    Attributes:
        response_id: The id of the response; empty if it came without one.
        scope: The provider, endpoint and account that stores it.
        digest: The digest of the complete context of the response, including its output.
        block_count: The number of blocks of the Turn that the digest covers.
        depth: The number of responses in its chain, including itself.
        root_created_at: When the first response of the chain was created, in seconds since the epoch.
        status: Its status; ``lost`` if the server no longer has it, or why it can never be continued.
        stored: Whether the server stored it.
        created_at: When it was created, in seconds since the epoch.
        expires_at: When the server drops it, or None.
        barrier: The position, among the covered blocks, of the compaction item that the server's memory
            starts with; None if it starts with the conversation.
        derived: The digests of the reasoning and compaction items of its output.
        counted: The server's token counts for it, if they can be compared with later ones.
        request: While it is generated in the background, the record of its request, as JSON; see ``keep_request``.
    """

    response_id: str
    scope: str
    digest: str
    block_count: int
    depth: int = 1
    root_created_at: float = 0.0
    status: Status = "completed"
    stored: bool = True
    created_at: float = 0.0
    expires_at: float | None = None
    barrier: int | None = None
    derived: tuple[str, ...] = ()
    counted: TokenCounts | None = None
    request: str = ""


class RejectedAnchor(msgspec.Struct, frozen=True):
    """A candidate that cannot be used.

    Attributes:
        response_id: The response.
        reason: Why it cannot be used; ``REASONS`` describes it.
        record: Its record.
    """

    response_id: str
    reason: Reason
    record: AnchorRecord

    def __str__(self) -> str:
        return f"{self.name}: {REASONS[self.reason]}"

    @property
    def name(self) -> str:
        """The id of the response, or words for the last answer if it came without an id."""
        return self.response_id or UNNAMED_ANSWER


UNNAMED_ANSWER = "the last answer"
"""The name of an answer without an id. Of these, only the last one of a server has a record."""


_CONVERSATION_SUFFIX = " conversation:"


def conversation_scope(scope: str, conversation_id: str) -> str:
    """Return the scope of responses inside a server-side conversation object."""
    return f"{scope}{_CONVERSATION_SUFFIX}{conversation_id}"


def get_conversation_id(scope: str) -> str:
    """Return the server-side conversation object of a scope; empty if it has none."""
    return scope.partition(_CONVERSATION_SUFFIX)[2]


def base_scope(scope: str) -> str:
    """Return the provider's scope, without the conversation object."""
    return scope.partition(_CONVERSATION_SUFFIX)[0]


def drop_replaced(records: Iterable[AnchorRecord]) -> list[AnchorRecord]:
    """Return the records without those that a newer unusable record has replaced, as `with_anchor` does."""
    oldest_first = sorted(records, key=attrgetter("created_at"))
    replacements = {
        _get_anchor_key(record): record
        for record in oldest_first
        if is_unusable_status(record.status)
    }
    if not replacements:
        return oldest_first
    return [
        record
        for record in oldest_first
        if replacements.get(_get_anchor_key(record), record) is record
    ]


def matches_prefix(record: AnchorRecord, index: PrefixIndex) -> bool:
    """Return whether the indexed blocks start with exactly the context that the record describes."""
    count = record.block_count
    return 0 < count <= index.covered and index.digest(count) == record.digest


def select_matching(turn: Turn, records: Sequence[AnchorRecord]) -> list[AnchorRecord]:
    """Return the records of responses whose context is a prefix of the Turn."""
    if not records:
        return []
    index = get_prefix_index(turn)
    return [record for record in records if matches_prefix(record, index)]


def relied_until(
    created_at: float, expires_at: float | None, root_created_at: float
) -> float | None:
    """Return the time until which a response may be used as an anchor; None if there is no end.

    Whether a server that dropped the first response of a chain still serves its descendants is not
    known, so a chain is relied on for as long as its root is stored. The margin prevents a request from
    arriving after the expiry; it is shorter if the retention is short.

    Args:
        created_at: When the response was created.
        expires_at: When the server drops it, if it does.
        root_created_at: When the first response of its chain was created; 0 if it is the first.
    """
    if expires_at is None:
        return None
    retention = expires_at - created_at
    margin = min(EXPIRY_MARGIN, max(retention, 0.0) / 20)
    return min(expires_at, (root_created_at or created_at) + retention) - margin


def is_expired(response: "AnchorRecord | RequestRecord", now: float) -> bool:
    """Return whether a response, or the root of its chain, may be dropped by the server at ``now``.

    The planner, `kedge tree` and the page all use this definition of "expired".
    """
    until = relied_until(response.created_at, response.expires_at, response.root_created_at)
    return until is not None and now >= until


def limit_expiry(
    created_at: float, expires_at: float | None, retention: float | None
) -> float | None:
    """Return when a response expires, if it is relied on for at most ``retention`` seconds."""
    if retention is None:
        return expires_at
    limit = created_at + retention
    if expires_at is None:
        return limit
    return min(expires_at, limit)


def has_hidden_context(body: Mapping[str, Any]) -> bool:
    """Return whether the context of a response to this request has messages that the request does not.

    Only the server knows the messages of a stored prompt. So such a request is sent in full, and its response is not
    continued: ``context(response)`` cannot be proved to equal a prefix of the conversation.
    """
    return body.get("prompt") is not None


def is_unusable_status(status: str) -> TypeIs[UnusableStatus]:
    """Return whether a response with this status can never be continued, although it is complete."""
    return status in UNUSABLE_STATUSES


def unavailable_reason(
    record: AnchorRecord,
    scope: str,
    now: float,
    max_depth: int | None = None,
    not_before: float = 0.0,
) -> Reason | None:
    """Return why a response is not available on the server, or None if it is."""
    if record.scope != scope:
        return "scope"
    if is_unusable_status(record.status):
        return record.status
    if not record.response_id:
        return "unproven"
    if record.status == "lost" or record.created_at < not_before:
        return "lost"
    if record.status != "completed":
        return "incomplete"
    if not record.stored:
        return "unstored"
    if is_expired(record, now):
        return "expired"
    if max_depth is not None and record.depth > max_depth:
        return "too_deep"
    return None


Mode = Literal["chained", "stateless", "conversation"]
"""Whether a request continues a proved response, nothing, or a conversation object of the server."""
MODES: tuple[Mode, ...] = ("chained", "stateless", "conversation")
"""The modes, the default first."""
STATE_KEY = "kedge.state"


def validate_mode(mode: Mode | None) -> Mode | None:
    """Return a mode that exists, or None; raise InvalidSetting for any other value."""
    if mode is not None:
        check_choice("mode", mode, MODES)
    return mode


anchor_sort_key: Callable[[AnchorRecord], tuple[int, float]] = attrgetter(
    "block_count", "created_at"
)
"""Return the sort key of a record: the length of the prefix that it covers, then its age."""


_get_response_id = attrgetter("response_id")
_get_anchor_key = attrgetter("response_id", "scope")


class _SortedAnchors(tuple[AnchorRecord, ...]):
    """Records that are sorted already."""

    __slots__ = ()


class ConversationState(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The known state of the server's memory of a Turn.

    Attributes:
        mode: The mode of this conversation, if it differs from the engine's default.
        previous_response_id: The newest response.
        conversation_id: The server-side conversation object, if one is used.
        anchors: The records, sorted by the length of the prefix that they cover, the newest last among
            equals.
    """

    mode: Mode | None = None
    previous_response_id: str = ""
    conversation_id: str = ""
    anchors: tuple[AnchorRecord, ...] = ()

    def __post_init__(self) -> None:
        if type(self.anchors) is not _SortedAnchors or not self.anchors:
            # Without records it is the default itself, which omit_defaults compares by identity.
            anchors = _SortedAnchors(sorted(self.anchors, key=anchor_sort_key))
            force_setattr(self, "anchors", anchors or ())

    def anchor(self, response_id: str, scope: str | None = None) -> AnchorRecord | None:
        """Return the newest record of a response.

        Args:
            response_id: The response.
            scope: The scope of the record; any by default.

        Returns:
            The record, or None.
        """
        for record in reversed(self.anchors):
            if record.response_id == response_id and scope in (None, record.scope):
                return record
        return None

    def with_anchor(self, record: AnchorRecord) -> "ConversationState":
        """Return the state with a record added.

        Args:
            record: The record, which replaces an earlier one of the same response and scope.

        Returns:
            The new state.
        """
        anchors = self.anchors
        if record.response_id in map(_get_response_id, anchors):
            key = _get_anchor_key(record)
            anchors = tuple(anchor for anchor in anchors if _get_anchor_key(anchor) != key)
        index = bisect_right(anchors, anchor_sort_key(record), key=anchor_sort_key)
        merged = _SortedAnchors((*anchors[:index], record, *anchors[index:]))
        return replace(self, anchors=merged)

    def mark_lost(self, lost: Iterable[str], scope: str | None = None) -> "ConversationState":
        """Return the state with responses marked as lost: the server no longer has them.

        Args:
            lost: The ids of the responses.
            scope: The scope of their records; any by default.

        Returns:
            The new state.
        """
        lost_ids = frozenset(lost)
        anchors: list[AnchorRecord] = []
        for record in self.anchors:
            is_named = record.response_id in lost_ids and scope in (None, record.scope)
            if is_named and record.status == "completed":
                record = replace(record, status="lost")  # noqa: PLW2901
            anchors.append(record)

        state = replace(self, anchors=_SortedAnchors(anchors))
        if self.previous_response_id in lost_ids:
            return replace(state, previous_response_id="")
        return state

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values, without fields at their default."""
        form = {**structs.asdict(self), "anchors": [*map(dump_record, self.anchors)]}
        return {name: value for name, value in form.items() if value}


_EMPTY_STATE = ConversationState()


def get_state(turn: Turn) -> ConversationState:
    """Return the conversation state of a Turn.

    Args:
        turn: The Turn.

    Returns:
        Its state; an empty one if it has none, or none that can be parsed.
    """
    check_turn(turn)
    value = turn.data.get(STATE_KEY)
    if isinstance(value, ConversationState):
        return value
    if isinstance(value, Mapping):
        return _load_state(cast("Mapping[str, Any]", thaw(value)))
    return _EMPTY_STATE


def set_state(turn: Turn, state: ConversationState) -> Turn:
    """Return the Turn with another conversation state.

    Args:
        turn: The Turn.
        state: The new state.

    Returns:
        A Turn with the same blocks.
    """
    return replace_data(turn, add_frozen(turn.data, STATE_KEY, state))


def drop_anchors(turn: Turn) -> Turn:
    """Return the Turn without anchors and without ids of the server's memory; the mode is retained.

    Anchors are as trustworthy as the source of the Turn: a forged record can name a response of another
    conversation, whose context the model would then read. Drop them from a Turn that another party
    wrote; the next request sends everything and records a new anchor.

    Args:
        turn: A Turn, for example one read by ``kedge.turns.loads``.

    Returns:
        The Turn with the same blocks and data, and no anchor.
    """
    return set_state(turn, ConversationState(mode=get_state(turn).mode))


def dump_record(record: AnchorRecord) -> dict[str, Any]:
    """Return a record as plain JSON values, without fields at their default.

    Args:
        record: The record.

    Returns:
        A dict that ``load_record`` reads.
    """
    # Not by omit_defaults, which compares by identity: equal records have equal forms.
    form = zip(_FIELD_DEFAULTS, msgspec.to_builtins(record), strict=True)
    return {name: value for name, value in form if value != _FIELD_DEFAULTS[name]}


_FIELD_DEFAULTS = {each.name: each.default for each in structs.fields(AnchorRecord)}


def load_record(form: object) -> AnchorRecord | None:
    """Parse a record.

    Args:
        form: The output of ``dump_record``.

    Returns:
        The record, or None if it is malformed: such a record proves nothing.
    """
    if not isinstance(form, dict):
        return None
    members = cast("dict[str, Any]", form)
    try:
        values = [members.get(name, default) for name, default in _FIELD_DEFAULTS.items()]
        return msgspec.convert(values, AnchorRecord)
    except msgspec.ValidationError:
        if members.get("counted") is None:
            return None
        # Without its counts a record proves as much; only a verdict on the server's memory is delayed.
        return load_record({**members, "counted": None})


def _load_state(form: Mapping[str, Any]) -> ConversationState:
    """Parse a state; members that are malformed count as missing."""
    mode = form.get("mode")
    records: Any = form.get("anchors")
    if not isinstance(records, list):
        records = []
    loaded = map(load_record, cast("list[object]", records))
    return ConversationState(
        mode=mode if mode in MODES else None,
        previous_response_id=_read_text(form, "previous_response_id"),
        conversation_id=_read_text(form, "conversation_id"),
        anchors=tuple(record for record in loaded if record is not None),
    )


def _read_text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    return value if isinstance(value, str) else ""


MAX_STALE_ANCHORS = 64
"""The number of records that no longer match and are retained, in case an edit is undone."""


@checked
def tag_blocks(blocks: Iterable[Block], response_id: str) -> list[Block]:
    """Tag blocks with the response that produced them and their position in its output.

    Args:
        blocks: The blocks in output order.
        response_id: The response; may be empty.

    Returns:
        The tagged blocks.
    """
    return [_tag_block(block, position, response_id) for position, block in enumerate(blocks)]


def _tag_block(block: Block, position: int, response_id: str) -> Block:
    source = block.source or Source()
    index = source.output_index
    is_placed = index is not None and response_id in ("", source.response_id)
    if block.origin == ENGINE and is_placed:
        return block
    if index is None:
        index = position
    tag = Source(response_id or source.response_id, source.item_id, index)
    return replace(block, origin=ENGINE, source=tag)


def record_response(
    turn: Turn,
    blocks: Iterable[Block],
    *,
    response_id: str,
    plan: "RequestPlan",
    created_at: float,
    status: Status = "completed",
    stored: bool = True,
    retention: float | None = DEFAULT_RETENTION,
    conversation_id: str = "",
    head: bool = True,
    counted: TokenCounts | None = None,
) -> Turn:
    """Append the blocks of a response to the Turn that was sent, and record an anchor.

    The record of a response that can never be continued, such as one without an id, is only the reason why an
    older one is continued. Nothing is recorded if ``plan`` was made for another Turn, because the context of the
    response is then unknown.

    Args:
        turn: The Turn that was sent.
        blocks: The blocks of the response.
        response_id: The id of the response; may be empty.
        plan: The plan that the request was built from.
        created_at: When the response was created, in seconds since the epoch.
        status: The status of the response; ``no_id`` is set for any complete one without an id.
        stored: Whether the server was asked to store it.
        retention: Seconds for which the server stores it; None if it does not expire.
        conversation_id: The server-side conversation object that was used, if any.
        head: Whether the response becomes the state's ``previous_response_id``; false for an API that
            stores nothing.
        counted: The tokens that the server counted for the request.

    Returns:
        The Turn with the blocks and the record.
    """
    was_sent = turn is plan.source or prefix_digest(turn) == plan.digest
    output = tag_blocks(blocks, response_id)
    turn = turn.append(*output)
    log.debug("tagged %d blocks", len(output), response_id=response_id, turn_id=turn.id)
    if not was_sent:
        log.debug("no anchor: another Turn was sent", turn_id=turn.id)
        return turn
    if not response_id:
        if status == "running":  # without an id it cannot be fetched
            return turn
        status = "no_id"
    index = get_prefix_index(turn)
    scope = plan.scope
    if conversation_id:
        scope = conversation_scope(plan.scope, conversation_id)
    record = AnchorRecord(
        response_id=response_id,
        scope=scope,
        digest=index.digest(index.covered),
        block_count=index.covered,
        root_created_at=created_at,
        status=status,
        stored=stored,
        created_at=created_at,
        expires_at=limit_expiry(created_at, None, retention),
        barrier=_find_barrier(plan, index, len(output)),
        derived=derived_digests(output),
        counted=counted,
    )
    record = place_in_chain(record, plan.anchor)
    state = prune_anchors(get_state(turn).with_anchor(record), turn)
    if status == "completed" and head:
        state = replace(state, previous_response_id=response_id, conversation_id=conversation_id)
    return set_state(turn, state)


def place_in_chain(record: AnchorRecord, parent: AnchorRecord | None) -> AnchorRecord:
    """Return the record of a response with its place in the chain of the response that it continues, if any."""
    if is_unusable_status(record.status):  # it is part of no chain
        return replace(record, depth=0, root_created_at=0.0, expires_at=None)
    if parent is None:
        return record
    root_created_at = parent.root_created_at or parent.created_at
    return replace(record, depth=parent.depth + 1, root_created_at=root_created_at)


def _find_barrier(plan: "RequestPlan", index: PrefixIndex, output_length: int) -> int | None:
    """Return where the server's memory starts after a response: at a compaction in its output, or as planned."""
    start = index.length - output_length
    if index.barriers and index.barriers[-1] >= start:
        return index.count(index.barriers[-1])
    return plan.barrier


_get_status = attrgetter("status")


@checked
def find_running(turn: Turn, scope: str | None = None) -> AnchorRecord | None:
    """Return the record of the response that answers a Turn and is still generated in the background.

    Args:
        turn: The Turn as it was sent.
        scope: The provider, endpoint and account; any by default.

    Returns:
        The record, or None if there is no such response, or if the Turn was changed since.
    """
    anchors = get_state(turn).anchors
    statuses = set(map(_get_status, anchors))
    if statuses.isdisjoint(WAITING_STATUSES):  # as usual, and much faster than the loop
        return None
    for record in reversed(anchors):
        if record.status not in WAITING_STATUSES or not record.block_count:
            continue
        is_known = scope is None or base_scope(record.scope) == base_scope(scope)
        if is_known and record.digest == prefix_digest(turn):
            return record
    return None


def prune_anchors(state: ConversationState, turn: Turn) -> ConversationState:
    """Drop the oldest records that no longer match, once there are more of them than of others.

    A conversation that is edited or compacted again and again would otherwise accumulate them.
    """
    if len(state.anchors) <= 2 * (turn.body_length + MAX_STALE_ANCHORS):
        return state
    matching = {id(record) for record in select_matching(turn, state.anchors)}
    stale = [record for record in state.anchors if id(record) not in matching]
    dropped = sorted(stale, key=lambda record: record.created_at)[:-MAX_STALE_ANCHORS]
    dropped_ids = {id(record) for record in dropped}
    kept = tuple(record for record in state.anchors if id(record) not in dropped_ids)
    return replace(state, anchors=kept)


def drop_changed_anchors(turn: Turn) -> Turn:
    """Return the Turn without the anchor records that no longer match its blocks, except the newest of these.

    The newest one is the reason why the next request is sent in full.

    Args:
        turn: A Turn whose blocks were edited.

    Returns:
        The Turn. Unless the context of the newest response is a prefix of it, the Turn is also detached from its
        conversation object, which has more items.
    """
    state = get_state(turn)
    matching = select_matching(turn, state.anchors)
    if len(matching) == len(state.anchors):
        return turn
    previous = ""
    if matching:
        previous = max(matching, key=lambda record: record.block_count).response_id
    changed = [record for record in state.anchors if record not in matching]
    last_changed = max(changed, key=lambda record: (record.created_at, record.block_count))
    state = replace(state, anchors=(*matching, last_changed))
    if previous != state.previous_response_id:
        state = replace(state, previous_response_id=previous, conversation_id="")
    return set_state(turn, state)
