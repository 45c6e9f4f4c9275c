"""The state of a Turn that is stored with a node: what does not follow from the responses on its path.

    {"mode":…, "conversation_id":…, "previous_response_id":…, "data":{…}, "anchors":{…}}

``anchors`` has the changes of anchor records that were made at the node. Nodes below one with such changes have an
empty object there, so that other paths are not searched for changes.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from kedge._internal.json_text import decode
from kedge._internal.json_text import encode_text as encode
from kedge.planning import AnchorRecord, ConversationState, get_state
from kedge.planning.anchor_changes import NO_CHANGES, AnchorChanges, compare_anchors
from kedge.planning.anchors import MODES, STATE_KEY, Mode, limit_expiry
from kedge.turns import Turn
from kedge.turns.frozen_json import EMPTY, FrozenMap, thaw

Json = dict[str, Any]
_CHANGES_MEMBER = '"anchors":{'
CHANGES_PATTERN = f'%{_CHANGES_MEMBER}"%'
"""The pattern of LIKE that finds the nodes with changes of anchor records, and perhaps others."""
_get_creation_time = attrgetter("created_at")


def get_stored_data(turn: Turn) -> FrozenMap:
    """Return the data of a Turn that is stored as such: all except its conversation state."""
    return FrozenMap({name: value for name, value in turn.data.items() if name != STATE_KEY})


def encode_node_state(
    state: ConversationState,
    data: FrozenMap,
    mode: Mode | None,
    *,
    parent: str | None = None,
    changes: AnchorChanges = NO_CHANGES,
) -> str | None:
    """Encode the state of a node, if there is any.

    Args:
        state: The conversation state of the Turn; its anchor records are not encoded.
        data: The data of the Turn.
        mode: The mode of the conversation.
        parent: The encoded state of the parent node.
        changes: The changes of the anchor records at this node.
    """
    form: Json = {}
    if state.mode and state.mode != mode:
        form["mode"] = state.mode
    if state.conversation_id:
        form["conversation_id"] = state.conversation_id
        form["previous_response_id"] = state.previous_response_id
    if data:
        form["data"] = thaw(data)
    if changes or has_changes(parent):
        form["anchors"] = msgspec.to_builtins(changes)
    return _encode(form)


def _encode(form: Json) -> str | None:
    return encode(form) if form else None


def _decode(text: str | None) -> Json:
    return cast("Json", decode(text)) if text else {}


def encode_first_state(turn: Turn, mode: Mode | None) -> str | None:
    """Encode the state of a Turn that a conversation begins with; the mode of the conversation precedes its own."""
    state = get_state(turn)
    state = replace(state, mode=mode or state.mode)
    # The store has none of its responses.
    changes = compare_anchors((), turn)
    return encode_node_state(state, get_stored_data(turn), mode, changes=changes)


def encode_without_mode(text: str | None) -> str | None:
    """Return the encoded state of a node without a mode of its own; the same text if it has none."""
    form = _decode(text)
    if "mode" not in form:
        return text
    del form["mode"]
    return _encode(form)


def has_changes(text: str | None) -> bool:
    """Return whether anchor records were changed at a node or above it."""
    return text is not None and _CHANGES_MEMBER in text


def decode_changes(text: str, retention: float | None = None) -> AnchorChanges:
    """Return the changes of anchor records at a node; added ones expire after ``retention`` seconds at the latest."""
    try:
        changes = msgspec.convert(_decode(text).get("anchors", {}), AnchorChanges)
    except msgspec.ValidationError:  # costs one full send
        return NO_CHANGES
    added: list[AnchorRecord] = []
    for anchor in changes.added:
        expires_at = limit_expiry(anchor.created_at, anchor.expires_at, retention)
        added.append(replace(anchor, expires_at=expires_at))
    return replace(changes, added=tuple(added))


def decode_mode(text: str | None, mode: Mode | None) -> Mode | None:
    """Return the mode at a node: its own, or else the mode of its conversation."""
    own_mode = _decode(text).get("mode")
    return own_mode if own_mode in MODES else mode


def decode_node_state(
    text: str | None, anchors: Sequence[AnchorRecord], mode: Mode | None
) -> tuple[ConversationState, FrozenMap]:
    """Return the state and the data of a Turn, from its anchor records and the state encoded in its node."""
    form = _decode(text)
    state = ConversationState(
        decode_mode(text, mode),
        conversation_id=form.get("conversation_id", ""),
        anchors=tuple(anchors),
    )
    previous = form.get("previous_response_id", _find_newest_id(state.anchors))
    state = replace(state, previous_response_id=previous)
    data = FrozenMap(form["data"]) if form.get("data") else EMPTY
    return state, data


def _find_newest_id(anchors: Sequence[AnchorRecord]) -> str:
    """Return the id of the newest completed response; of several at the same time, the last in the list."""
    completed = [anchor for anchor in reversed(anchors) if anchor.status == "completed"]
    if not completed:
        return ""
    return max(completed, key=_get_creation_time).response_id
