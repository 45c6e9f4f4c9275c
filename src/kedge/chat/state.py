"""State bytes: a whole conversation as one opaque value that a caller keeps where they like.

    {"version":2,"provider":…,"processed_length":…,"id":…,"blocks":[…],"responses":[…],"anchors":[…],
     …,"checksum":"sha256:…"}

The checksum comes last and covers every byte before it, so nothing can change unseen. Reading never
raises: what cannot be used is a ``Discarded``, which says why in a word and in a sentence. There is never
half a history.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from kedge.chat.layout import (
    Json,
    encode,
    quote,
    read_anchors,
    read_blocks,
    write_anchors,
    write_blocks,
)
from kedge.chat.sealing import Sealer, is_sealed
from kedge.chat.upgrades import CHECKED_SINCE, VERSION, upgraded
from kedge.errors import KedgeError
from kedge.planning import ConversationState, get_state, set_state
from kedge.planning.state import MODES, STATE_KEY
from kedge.turns import Block, Turn
from kedge.turns.frozen import EMPTY, FrozenMap, check_text, thaw

Reason = Literal[
    "not_json", "version", "damaged", "provider", "malformed", "encrypted", "wrong_key"
]
REASONS: dict[Reason, str] = {
    "not_json": "it is not JSON: cut off, damaged, or no state at all",
    "version": "its version is not known here; a newer Kedge wrote it, or it is no state",
    "damaged": "its checksum does not match: it was changed or damaged",
    "provider": "it belongs to another provider",
    "malformed": "its members are not those of a state",
    "encrypted": "it is encrypted, and no key was given",
    "wrong_key": "it cannot be decrypted: another key, or damage",
}
"""Every reason to discard a state, in plain words."""

_CHECKSUM = b',"checksum":"sha256:'
_END = b'"}'
_TAIL = len(_CHECKSUM) + 64 + len(_END)


@dataclass(frozen=True, slots=True)
class ChatState:
    """What state bytes hold.

    ``blocks`` is the conversation without leading system blocks; the first ``processed_length`` of them
    a model has seen, the others are pending. ``memory`` holds the anchors.
    """

    provider: str
    blocks: tuple[Block, ...] = ()
    processed_length: int = 0
    memory: ConversationState = field(default_factory=ConversationState)
    turn_id: str = ""
    data: FrozenMap = EMPTY
    version: int = VERSION
    """The version of the bytes that it was read from."""

    def turn(self, leading: tuple[Block, ...] = (), following: tuple[Block, ...] = ()) -> Turn:
        """The Turn to send: fresh leading blocks, the history, and what is new."""
        turn = Turn((*leading, *self.blocks, *following), id=self.turn_id, data=self.data)
        return set_state(turn, self.memory)


@dataclass(frozen=True, slots=True)
class Discarded:
    """Why a state cannot be used, and what could be read of it nevertheless."""

    reason: Reason
    detail: str = ""
    members: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{REASONS[self.reason]} ({self.detail})" if self.detail else REASONS[self.reason]


def write_state(state: ChatState) -> bytes:
    """Write state bytes."""
    responses: dict[str, int] = {}

    def number(response_id: str) -> int:
        return responses.setdefault(response_id, len(responses))

    anchors = write_anchors(state.memory.anchors, number)
    blocks = write_blocks(state.blocks, number)
    members = {
        "version": str(VERSION),
        "provider": quote(state.provider),
        "processed_length": str(state.processed_length),
        "id": quote(state.turn_id),
        "blocks": blocks,
        "responses": encode(list(responses)),
        "anchors": anchors,
        **{name: encode(value) for name, value in _further(state).items() if value},
    }
    covered = ("{" + ",".join(f'"{name}":{text}' for name, text in members.items())).encode()
    return b"".join((covered, _CHECKSUM, hashlib.sha256(covered).hexdigest().encode(), _END))


def _further(state: ChatState) -> Json:
    memory = state.memory
    return {
        "mode": memory.mode,
        "previous_response_id": memory.previous_response_id,
        "conversation_id": memory.conversation_id,
        "data": thaw(state.data),
    }


def read_state(
    data: bytes, provider: str | None, sealer: Sealer | None = None
) -> ChatState | Discarded:
    """Read state bytes; without a ``provider``, those of any. Never raises."""
    if is_sealed(data):
        opened = sealer.open(data) if sealer else None
        if opened is None:
            return Discarded("wrong_key" if sealer else "encrypted")
        data = opened
    members = parsed(data)
    if isinstance(members, Discarded):
        return members
    if provider is not None and members.get("provider") != provider:
        return Discarded("provider", _named_provider(members), members)
    try:
        return _read_members(members)
    except (KedgeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Discarded("malformed", type(error).__name__, members)


def as_bytes(state: object) -> bytes:
    """State as bytes, whatever was given for it; no state is no bytes. Never raises."""
    match state:
        case None:
            return b""
        case bytes():
            return state
        case bytearray() | memoryview():
            return bytes(cast("bytearray", state))
        case str():  # from a place that keeps text
            return state.encode(errors="replace")
        case _:
            return b"not bytes"


def parsed(data: bytes) -> Json | Discarded:
    """The members of a state, intact and of the current version. Never raises."""
    try:
        members = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Discarded("not_json")
    if not isinstance(members, dict):
        return Discarded("malformed", "not an object")
    members = cast("Json", members)
    version = members.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        return Discarded("version", "", members)
    if version >= CHECKED_SINCE and not is_intact(data):
        return Discarded("damaged", "", members)
    try:
        return {**upgraded(members), "written_as": version}
    except (KedgeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Discarded("malformed", type(error).__name__, members)


def is_intact(data: bytes) -> bool:
    """Whether the checksum at the end is that of all the bytes before it."""
    covered, tail = data[:-_TAIL], data[-_TAIL:]
    return tail == b"".join((_CHECKSUM, hashlib.sha256(covered).hexdigest().encode(), _END))


def _read_members(members: Json) -> ChatState:
    responses = [_text(each) for each in members["responses"]]
    blocks = tuple(read_blocks(members["blocks"], responses))
    length = members["processed_length"]
    if type(length) is not int or not 0 <= length <= len(blocks):
        raise ValueError("processed_length is not a number of blocks")
    if len({block.id for block in blocks}) != len(blocks):
        raise ValueError("two blocks have one id")
    mode = members.get("mode")
    if mode is not None and mode not in MODES:
        raise ValueError("the mode is not one of ours")
    memory = ConversationState(
        mode,
        _text(members.get("previous_response_id", "")),
        _text(members.get("conversation_id", "")),
        tuple(read_anchors(members["anchors"], responses)),
    )
    data = FrozenMap(members["data"]) if "data" in members else EMPTY
    return ChatState(
        _text(members["provider"]),
        blocks,
        length,
        memory,
        _text(members["id"]),
        data,
        members["written_as"],
    )


def state_of(turn: Turn, provider: str, processed_length: int) -> ChatState:
    """What of a Turn goes into state bytes: all but its leading system blocks."""
    data = FrozenMap({name: value for name, value in turn.data.items() if name != STATE_KEY})
    return ChatState(provider, turn.body, processed_length, get_state(turn), turn.id, data)


def _named_provider(members: Json) -> str:
    name = members.get("provider")
    return name[:80] if isinstance(name, str) else "it does not say which"


def _text(value: object) -> str:
    return check_text(value, "state")  # pyright: ignore[reportArgumentType]


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
