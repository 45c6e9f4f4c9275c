"""The conversation state of a Turn: mode, ids of the server's memory, and anchor records.

The state is stored in ``turn.data`` and is part of the JSON form. It is a cache: a state that cannot be parsed
is treated as empty, and costs one full send.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, cast

import msgspec
from msgspec import structs
from msgspec.structs import force_setattr, replace

from kedge.errors import InvalidSetting
from kedge.planning.anchors import AnchorRecord
from kedge.turns import Turn
from kedge.turns.frozen_json import thaw

Mode = Literal["chained", "stateless", "conversation"]
"""Whether a request continues a proved response, nothing, or a conversation object of the server."""
MODES: tuple[Mode, ...] = ("chained", "stateless", "conversation")
"""The modes, the default first."""
STATE_KEY = "kedge.state"


def validate_mode(mode: Mode | None) -> Mode | None:
    """Return a mode that exists, or None; raise InvalidSetting for any other value."""
    if mode is not None and mode not in MODES:
        raise InvalidSetting(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode


anchor_sort_key: Callable[[AnchorRecord], tuple[int, float]] = attrgetter(
    "block_count", "created_at"
)
"""Return the sort key of a record: the length of the prefix that it covers, then its age."""


_get_response_id = attrgetter("response_id")


class _SortedAnchors(tuple[AnchorRecord, ...]):
    """Records that are sorted already."""

    __slots__ = ()


class ConversationState(msgspec.Struct, frozen=True):
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
        if type(self.anchors) is not _SortedAnchors:
            force_setattr(
                self, "anchors", _SortedAnchors(sorted(self.anchors, key=anchor_sort_key))
            )

    def anchor(self, response_id: str, scope: str | None = None) -> AnchorRecord | None:
        """Return the newest record of a response.

        Args:
            response_id: The response.
            scope: The scope of the record; any by default.

        Returns:
            The record, or None.
        """
        newest_first = self.anchors[::-1]
        if response_id not in map(_get_response_id, newest_first):  # faster than the loop below
            return None
        for record in newest_first:
            if record.response_id == response_id and scope in (None, record.scope):
                return record
        return None

    def find_matching(self, record: AnchorRecord) -> AnchorRecord | None:
        """Return the record in this state of the same response as a record from elsewhere.

        Args:
            record: The other record.

        Returns:
            The record, or None.
        """
        anchors, key = self.anchors, anchor_sort_key(record)
        start = bisect_left(anchors, key, key=anchor_sort_key)
        stop = bisect_right(anchors, key, lo=start, key=anchor_sort_key)
        for each in anchors[start:stop]:
            if (each.response_id, each.scope) == (record.response_id, record.scope):
                return each
        return None

    def with_anchor(self, record: AnchorRecord) -> "ConversationState":
        """Return the state with a record added.

        Args:
            record: The record, which replaces an earlier one of the same response and scope.

        Returns:
            The new state.
        """
        name, scope, anchors = record.response_id, record.scope, self.anchors
        if name in map(_get_response_id, anchors):
            anchors = tuple(
                each for each in anchors if (each.response_id, each.scope) != (name, scope)
            )
        index = bisect_right(anchors, anchor_sort_key(record), key=anchor_sort_key)
        merged = _SortedAnchors((*anchors[:index], record, *anchors[index:]))
        return replace(self, anchors=merged)

    def with_anchors(self, anchors: Iterable[AnchorRecord]) -> "ConversationState":
        """Return the state with other records.

        Args:
            anchors: All records of the new state.

        Returns:
            The new state.
        """
        return replace(self, anchors=tuple(anchors))

    def mark_lost(self, lost: Iterable[str], scope: str | None = None) -> "ConversationState":
        """Return the state with responses marked as lost: the server no longer has them.

        Args:
            lost: The ids of the responses.
            scope: The scope of their records; any by default.

        Returns:
            The new state.
        """
        lost_ids = frozenset(lost)
        anchors = (
            replace(each, status="lost")
            if each.response_id in lost_ids
            and each.status == "completed"
            and scope in (None, each.scope)
            else each
            for each in self.anchors
        )
        previous = "" if self.previous_response_id in lost_ids else self.previous_response_id
        return replace(self, anchors=_SortedAnchors(anchors), previous_response_id=previous)

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
    value = turn.data.get(STATE_KEY)
    if isinstance(value, ConversationState):
        return value
    return (
        _load_state(cast("Mapping[str, Any]", thaw(value)))
        if isinstance(value, Mapping)
        else _EMPTY_STATE
    )


def set_state(turn: Turn, state: ConversationState) -> Turn:
    """Return the Turn with another conversation state.

    Args:
        turn: The Turn.
        state: The new state.

    Returns:
        A Turn with the same blocks.
    """
    return turn.with_data({STATE_KEY: state})


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
    form = msgspec.to_builtins(record)
    return {name: value for name, value in form.items() if value != _FIELD_DEFAULTS[name]}


_FIELD_DEFAULTS = {each.name: each.default for each in structs.fields(AnchorRecord)}


def load_record(form: object) -> AnchorRecord | None:
    """Parse a record.

    Args:
        form: The output of ``dump_record``.

    Returns:
        The record, or None if it is malformed: such a record proves nothing.
    """
    members = cast("dict[str, Any]", form if isinstance(form, dict) else {})
    try:
        return msgspec.convert(members, AnchorRecord)
    except msgspec.ValidationError:
        # Without its counts a record proves as much; only a verdict on the server's memory is delayed.
        is_counted = members.get("counted") is not None
        return load_record({**members, "counted": None}) if is_counted else None


def _load_state(form: Mapping[str, Any]) -> ConversationState:
    mode = form.get("mode")
    previous, conversation = form.get("previous_response_id"), form.get("conversation_id")
    listed = form.get("anchors")
    records = map(load_record, cast("list[object]", listed) if isinstance(listed, list) else [])
    return ConversationState(
        mode if mode in MODES else None,
        previous if isinstance(previous, str) else "",
        conversation if isinstance(conversation, str) else "",
        tuple(record for record in records if record),
    )
