"""What a Turn carries about the server's memory of it: mode, ids, and the anchor records.

The state lives in ``turn.data`` and travels with the JSON form. It is a cache like everything it
describes: state that cannot be read is no state, and costs one full send.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from kedge.planning.anchors import AnchorRecord
from kedge.turns import Turn
from kedge.turns.frozen import thaw

Mode = Literal["chained", "stateless", "conversation"]
MODES: tuple[Mode, ...] = ("chained", "stateless", "conversation")
STATE_KEY = "kedge.state"

_DEFAULTS = {each.name: each.default for each in fields(AnchorRecord)}
_TYPES: dict[str, tuple[type, ...]] = {
    "response_id": (str,),
    "scope": (str,),
    "digest": (str,),
    "block_count": (int,),
    "depth": (int,),
    "root_created_at": (int, float),
    "status": (str,),
    "stored": (bool,),
    "created_at": (int, float),
    "expires_at": (int, float, type(None)),
}


def _order(record: AnchorRecord) -> tuple[int, float]:
    return (record.block_count, record.created_at)


class _Sorted(tuple[AnchorRecord, ...]):
    """Records that are in order already, so that nobody sorts them again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ConversationState:
    """The server's memory of a Turn, as far as we know it.

    ``anchors`` are sorted by the length of the prefix that they cover, the newest last among equals.
    ``mode`` is set when this conversation differs from the engine's default.
    """

    mode: Mode | None = None
    previous_response_id: str = ""
    conversation_id: str = ""
    anchors: tuple[AnchorRecord, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.anchors, _Sorted):
            object.__setattr__(self, "anchors", _Sorted(sorted(self.anchors, key=_order)))

    def anchor(self, response_id: str) -> AnchorRecord | None:
        """The record of this response."""
        for record in reversed(self.anchors):
            if record.response_id == response_id:
                return record
        return None

    def with_anchor(self, record: AnchorRecord) -> "ConversationState":
        """Write a record down; it takes the place of an earlier one for the same response."""
        anchors = self.anchors
        if self.anchor(record.response_id):
            anchors = [each for each in anchors if each.response_id != record.response_id]
        place = bisect_right(anchors, _order(record), key=_order)
        return replace(self, anchors=_Sorted((*anchors[:place], record, *anchors[place:])))

    def without(self, lost: Iterable[str]) -> "ConversationState":
        """Mark responses as lost: the server said that they are gone."""
        gone = frozenset(lost)
        anchors = (
            replace(each, status="lost") if each.response_id in gone else each
            for each in self.anchors
        )
        previous = "" if self.previous_response_id in gone else self.previous_response_id
        return replace(self, anchors=_Sorted(anchors), previous_response_id=previous)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; members at their default are left out."""
        form: dict[str, Any] = {
            "mode": self.mode,
            "previous_response_id": self.previous_response_id,
            "conversation_id": self.conversation_id,
            "anchors": [_dump_record(record) for record in self.anchors],
        }
        return {name: value for name, value in form.items() if value}


_EMPTY = ConversationState()


def get_state(turn: Turn) -> ConversationState:
    """What the Turn carries about the server's memory; an empty state if it carries nothing."""
    value = turn.data.get(STATE_KEY)
    if isinstance(value, ConversationState):
        return value
    return _load(cast("Mapping[str, Any]", thaw(value))) if isinstance(value, Mapping) else _EMPTY


def set_state(turn: Turn, state: ConversationState) -> Turn:
    """Return the Turn with this state."""
    return turn.with_data({STATE_KEY: state})


def _dump_record(record: AnchorRecord) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if v != _DEFAULTS[k]}


def _load(form: Mapping[str, Any]) -> ConversationState:
    mode = form.get("mode")
    previous, conversation = form.get("previous_response_id"), form.get("conversation_id")
    listed = form.get("anchors")
    records = map(_load_record, cast("list[object]", listed) if isinstance(listed, list) else [])
    return ConversationState(
        mode if mode in MODES else None,
        previous if isinstance(previous, str) else "",
        conversation if isinstance(conversation, str) else "",
        tuple(record for record in records if record),
    )


def _load_record(form: object) -> AnchorRecord | None:
    """Read a record; one that cannot be read proves nothing and is left out."""
    if not isinstance(form, dict):
        return None
    members = cast("dict[str, Any]", form)
    known = {name: members[name] for name in _TYPES if name in members}
    if any(not isinstance(value, _TYPES[name]) for name, value in known.items()):
        return None
    try:
        return AnchorRecord(**known)
    except TypeError:
        return None
