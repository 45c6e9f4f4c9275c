"""State bytes: a complete conversation as one opaque value that the caller stores.

    {"version":2,"provider":…,"id":…,"blocks":[…],"processed_length":…,"responses":[…],"anchors":[…],
     …,"checksum":"sha256:…"}

The checksum comes last and covers every byte before it, so changes are detected. Reading never raises: a
state that cannot be used becomes a ``DiscardedState`` with the reason. A history is never used in part, except that
blocks which the engine cannot send are left out (``leave_out``): a state must never make every later call fail.
"""

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple, cast

from kedge.chat.state_codec import (
    EncodedArray,
    Json,
    decode_anchors,
    decode_blocks,
    encode_anchors,
    encode_blocks,
)
from kedge.errors import KedgeError
from kedge.observe import get_logger
from kedge.planning import ConversationState, get_state, set_state
from kedge.planning.state import MODES, STATE_KEY
from kedge.security.encryption import FernetCipher, Key, new_key
from kedge.text.display import pluralize
from kedge.text.json_text import decode, encode_text, quote, reject_constant
from kedge.turns import (
    Block,
    SystemBlock,
    Turn,
    dump_block,
    item_from_block,
)
from kedge.turns.chat_messages import blocks_from_message
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, thaw

log = get_logger("kedge.chat")

__all__ = ["ENCRYPTED_PREFIX", "FernetCipher", "Key", "is_encrypted", "new_key"]

ENCRYPTED_PREFIX = b"gAAAAA"
"""The first bytes of every encrypted state: Fernet's version and the high bytes of its time."""


def is_encrypted(data: bytes) -> bool:
    """Return whether these bytes are an encrypted state."""
    return data.startswith(ENCRYPTED_PREFIX)


VERSION = 2
MESSAGES_VERSION = 1
"""The version of a plain list of messages without a checksum, to import a history that another program wrote."""


DiscardReason = Literal[
    "not_json", "version", "damaged", "provider", "malformed", "encrypted", "wrong_key"
]
DISCARD_REASONS: dict[DiscardReason, str] = {
    "not_json": "it is not JSON: cut off, damaged, or no state at all",
    "version": "its version is not known here; a newer Kedge wrote it, or it is no state",
    "damaged": "its checksum does not match: it was changed or damaged",
    "provider": "it belongs to another provider",
    "malformed": "its members are not those of a state",
    "encrypted": "it is encrypted, and no key was given",
    "wrong_key": "it cannot be decrypted: another key, or damage",
}
"""The description of every reason to discard a state."""

MAX_RECENT_BYTES = 1 << 20
"""The maximum size of the encoded states that a `Chat` caches, in bytes."""
_CHECKSUM_PREFIX = b',"checksum":"sha256:'
_CHECKSUM_SUFFIX = b'"}'
_CHECKSUM_LENGTH = len(_CHECKSUM_PREFIX) + 64 + len(_CHECKSUM_SUFFIX)


@dataclass(frozen=True, slots=True)
class ChatState:
    """The content of state bytes.

    ``blocks`` is the conversation without leading system blocks; a model has read the first
    ``processed_length`` of them, the others are pending. ``conversation_state`` has the anchors.
    """

    provider: str
    blocks: tuple[Block, ...] = ()
    processed_length: int = 0
    conversation_state: ConversationState = field(default_factory=ConversationState)
    turn_id: str = ""
    data: FrozenMap = EMPTY
    version: int = VERSION
    """The version of the bytes that it was decoded from."""
    history: Turn | None = field(default=None, compare=False, repr=False)
    """The Turn of this state, without leading system blocks; it has the digests of the blocks."""
    encoded: tuple[EncodedArray, EncodedArray] = field(
        default=(EncodedArray(), EncodedArray()), compare=False, repr=False
    )
    """The blocks and anchors of this or the previous state, with their JSON."""
    hashed: "HashedPrefix | None" = field(default=None, compare=False, repr=False)
    """The bytes of this or the previous state up to its last block, with their hash."""

    def turn(self, leading: tuple[Block, ...] = (), following: tuple[Block, ...] = ()) -> Turn:
        """Return the Turn to send: leading blocks, the history, and the new blocks."""
        if self.history is not None and self.history.blocks is self.blocks:
            turn = self.history.insert(0, *leading) if leading else self.history
            turn = turn.append(*following)
        else:
            turn = Turn((*leading, *self.blocks, *following), id=self.turn_id, data=self.data)
        return set_state(turn, self.conversation_state)


@dataclass(frozen=True, slots=True)
class DiscardedState:
    """The reason why a state cannot be used.

    Attributes:
        reason: One of ``DISCARD_REASONS``.
        detail: Further information, without content of the state.
        members: The members that could be read.
    """

    reason: DiscardReason
    detail: str = ""
    members: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __str__(self) -> str:
        return (
            f"{DISCARD_REASONS[self.reason]} ({self.detail})"
            if self.detail
            else DISCARD_REASONS[self.reason]
        )


def encode_state(state: ChatState) -> bytes:
    """Return the bytes of a state."""
    return encode_incrementally(state)[0]


def encode_incrementally(state: ChatState) -> tuple[bytes, ChatState]:
    """Return the bytes of a state, and the state with its JSON, from which the next one is encoded."""
    # Numbers every id when it is first looked up.
    responses: defaultdict[str, int] = defaultdict(count().__next__)
    number = responses.__getitem__
    known_blocks, known_anchors = state.encoded
    anchors = encode_anchors(state.conversation_state.anchors, number, known_anchors)
    blocks = encode_blocks(state.blocks, number, known_blocks)
    members = {
        "processed_length": str(state.processed_length),
        "responses": encode_text(list(responses)),
        "anchors": anchors.text,
        **{name: encode_text(value) for name, value in _optional_members(state).items() if value},
    }
    # What changes with every call follows the blocks, so that the hash of the previous state can be continued.
    prefix = (
        f'{{"version":{VERSION},"provider":{quote(state.provider)},"id":{quote(state.turn_id)},'
        f'"blocks":[{blocks.elements}'
    ).encode()
    rest = ("]" + "".join(f',"{name}":{text}' for name, text in members.items())).encode()
    hashed = HashedPrefix.build(prefix, state.hashed)
    data = b"".join((prefix, rest, _format_checksum(hashed.extend(rest))))
    return data, replace(state, encoded=(blocks, anchors), hashed=hashed)


class HashedPrefix(NamedTuple):
    """The first bytes of a state, and their SHA-256 hash, which is not changed."""

    data: bytes
    hash: Any

    @classmethod
    def build(cls, data: bytes, before: "HashedPrefix | None") -> "HashedPrefix":
        """Return the hash of these bytes, from that of their beginning if ``before`` has it."""
        if before and data.startswith(before.data):
            return cls(data, before.extend(data[len(before.data) :]))
        return cls(data, hashlib.sha256(data))

    def extend(self, more: bytes) -> Any:
        """Return the hash of these bytes followed by others."""
        extended = self.hash.copy()
        extended.update(more)
        return extended


def _format_checksum(digest: Any) -> bytes:
    """Return the last member of a state, and its end."""
    return b"".join((_CHECKSUM_PREFIX, digest.hexdigest().encode(), _CHECKSUM_SUFFIX))


class RecentStates:
    """A cache of encoded states: bytes that return to the same process are not decoded again.

    A state and the digests of its blocks depend only on its bytes, so the cache does not change any result. Its size
    is limited, and the oldest states are removed first.
    """

    def __init__(self, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._states: dict[bytes, ChatState] = {}
        self._lock = threading.Lock()

    def add(self, data: bytes, state: ChatState) -> None:
        """Remember the state that was encoded as these bytes."""
        with self._lock:
            if data in self._states or len(data) > self._max_bytes:
                return
            self._states[data] = state
            self._size += len(data)
            while self._size > self._max_bytes:
                oldest = next(iter(self._states))
                del self._states[oldest]
                self._size -= len(oldest)

    def find(self, data: bytes) -> ChatState | None:
        """Return the state of these bytes, if it is remembered."""
        return self._states.get(data)


def _optional_members(state: ChatState) -> Json:
    memory = state.conversation_state
    return {
        "mode": memory.mode,
        "previous_response_id": memory.previous_response_id,
        "conversation_id": memory.conversation_id,
        "data": thaw(state.data),
    }


def decode_state(
    data: bytes, provider: str | None, cipher: FernetCipher | None = None
) -> ChatState | DiscardedState:
    """Decode state bytes, of any provider if ``provider`` is None. Never raises."""
    if is_encrypted(data):
        opened = cipher.decrypt(data) if cipher else None
        if opened is None:
            return DiscardedState("wrong_key" if cipher else "encrypted")
        data = opened
    members = parse_members(data)
    if isinstance(members, DiscardedState):
        return members
    if provider is not None and members.get("provider") != provider:
        return DiscardedState("provider", _describe_provider(members), members)
    try:
        return _decode_members(members)
    except (KedgeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return DiscardedState("malformed", type(error).__name__, members)


def as_bytes(state: object) -> bytes:
    """Return a state as bytes; no state is empty bytes. Never raises.

    Whitespace around a state, such as the line end that an editor adds to a file, is removed.
    """
    match state:
        case None:
            return b""
        case bytes():
            return state.strip()
        case bytearray() | memoryview():
            return bytes(cast("bytearray", state)).strip()
        case str():  # from a store with text columns
            return state.encode(errors="replace").strip()
        case _:
            return b"not bytes"


def parse_members(data: bytes) -> Json | DiscardedState:
    """Return the members of a state, verified, or those of imported messages. Never raises."""
    try:
        members = decode(data, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return DiscardedState("not_json")
    if not isinstance(members, dict):
        return DiscardedState("malformed", "not an object")
    members = cast("Json", members)
    version = members.get("version")
    if type(version) is not int or version not in (VERSION, MESSAGES_VERSION):
        return DiscardedState("version", "", members)
    if version == VERSION:
        valid = has_valid_checksum(data)
        return members if valid else DiscardedState("damaged", "", members)
    try:
        return import_messages(members)
    except (KedgeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return DiscardedState("malformed", type(error).__name__, members)


def has_valid_checksum(data: bytes) -> bool:
    """Return whether the checksum at the end matches all bytes before it."""
    covered, tail = data[:-_CHECKSUM_LENGTH], data[-_CHECKSUM_LENGTH:]
    return tail == _format_checksum(hashlib.sha256(covered))


def _decode_members(members: Json) -> ChatState:
    responses = [_check_text(each) for each in members["responses"]]
    blocks = tuple(decode_blocks(members["blocks"], responses))
    length = members["processed_length"]
    if type(length) is not int or not 0 <= length <= len(blocks):
        raise ValueError("processed_length is not a number of blocks")
    if len({block.id for block in blocks}) != len(blocks):
        raise ValueError("two blocks have one id")
    mode = members.get("mode")
    if mode is not None and mode not in MODES:
        raise ValueError("the mode is not known")
    memory = ConversationState(
        mode,
        _check_text(members.get("previous_response_id", "")),
        _check_text(members.get("conversation_id", "")),
        tuple(decode_anchors(members["anchors"], responses)),
    )
    data = FrozenMap(members["data"]) if "data" in members else EMPTY
    return ChatState(
        _check_text(members["provider"]),
        blocks,
        length,
        memory,
        _check_text(members["id"]),
        data,
        members["version"],
    )


def state_from_turn(
    turn: Turn, provider: str, processed_length: int, before: ChatState | None = None
) -> ChatState:
    """Return the state of a Turn: everything except its leading system blocks.

    Args:
        turn: The Turn.
        provider: The provider that the state belongs to.
        processed_length: The number of blocks of the state that a model has read.
        before: The state that the Turn started with, which makes encoding faster.
    """
    data = FrozenMap({name: value for name, value in turn.data.items() if name != STATE_KEY})
    history = turn.remove(*(block.id for block in turn.leading))
    state = ChatState(
        provider, history.blocks, processed_length, get_state(turn), turn.id, data, history=history
    )
    if turn.extra:  # it is not stored, so the next call must not have it either
        state = replace(state, history=None)
    return replace(state, encoded=before.encoded, hashed=before.hashed) if before else state


def _describe_provider(members: Json) -> str:
    name = members.get("provider")
    return name[:80] if isinstance(name, str) else "not named"


def _check_text(value: object) -> str:
    return check_text(value, "state")  # pyright: ignore[reportArgumentType]


def import_messages(members: Json) -> Json:
    """Return the members of a state whose blocks are those of a list of messages, without its leading system messages.

    The messages are items of the Responses API or messages of the Chat Completions API, in any mixture. Any other
    message makes the state unusable: if it were passed on, the provider would reject it at every call, and the
    conversation could never continue.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The messages cannot be converted.
    """
    messages = members["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, cast("list[object]", messages))):
        raise ValueError("messages are objects with a role or a type")
    converted = [blocks_from_message(each) for each in cast("list[Json]", messages)]
    processed = members["processed_length"]
    if type(processed) is not int or not 0 <= processed <= len(converted):
        raise ValueError("processed_length is not a number of messages")
    seen = sum(map(len, converted[:processed]))
    blocks = [block for each in converted for block in each]
    _check_items([item_from_block(block) for block in blocks if block.kind != "reasoning"])
    lead = 0
    while lead < len(blocks) and isinstance(blocks[lead], SystemBlock):
        lead += 1
    return {
        "version": MESSAGES_VERSION,
        "provider": members["provider"],
        "processed_length": max(0, seen - lead),
        "id": "",
        "blocks": [{"as_is": dump_block(block)} for block in blocks[lead:]],
        "responses": [],
        "anchors": [],
    }


def _check_items(items: list[Json]) -> None:
    """Reject items that the Responses API rejects: a member is missing or has an invalid value."""
    from kedge.server.errors import ApiError  # slow to import, and few states are imported
    from kedge.server.schema.requests import ITEMS

    try:
        ITEMS.check(items, (None, "input"))
    except ApiError as error:
        raise ValueError("a message has a form that is not known") from error


def leave_out(state: ChatState, block_ids: Collection[str]) -> ChatState:
    """Return a state without blocks that cannot be sent; this is noted in the log."""
    if not block_ids:
        return state
    log.warning("%s of a state cannot be sent, and left out", pluralize(len(block_ids), "block"))
    blocks = tuple(block for block in state.blocks if block.id not in block_ids)
    read = state.blocks[: state.processed_length]
    length = len(read) - sum(block.id in block_ids for block in read)
    return replace(state, blocks=blocks, processed_length=length, history=None)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and ("role" in message or "type" in message)


@dataclass(frozen=True, slots=True)
class StateReport:
    """The content of state bytes, without any message text.

    Attributes:
        usable: Whether the state can be used.
        size: The number of bytes.
        reason: Why it would be discarded; one of ``DISCARD_REASONS``.
        problem: A description of the reason.
        encrypted: Whether it is encrypted.
        version: The version of its format, if it could be read.
        provider: The provider that it belongs to.
        blocks: The number of blocks.
        processed_length: The number of blocks that a model has read.
        responses: The number of responses that can be continued.
        kinds: The number of blocks of each kind.
    """

    usable: bool
    size: int
    reason: DiscardReason | None = None
    problem: str = ""
    encrypted: bool = False
    version: int | None = None
    provider: str = ""
    blocks: int = 0
    processed_length: int = 0
    responses: int = 0
    kinds: Mapping[str, int] = EMPTY

    @property
    def pending(self) -> int:
        """The number of blocks that no model has read yet."""
        return max(0, self.blocks - self.processed_length)

    def __str__(self) -> str:
        if not self.size:
            return "no state: a fresh conversation"
        encrypted = ", encrypted" if self.encrypted else ""
        lines = [f"{self.size} bytes{encrypted}, version {self.version or 'unknown'}"]
        if self.provider:
            lines[0] += f", provider {self.provider}"
        if self.usable:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
            lines.append(f"blocks: {self.blocks} ({kinds or 'none'}), pending: {self.pending}")
            lines.append(f"responses to chain on: {self.responses}")
        else:
            lines.append(f"would be discarded: {self.problem}")
        return "\n".join(lines)


def build_report(data: bytes, provider: str | None, cipher: FernetCipher | None) -> StateReport:
    """Return a report on state bytes, of any provider if ``provider`` is None. Never raises."""
    if not data:
        return StateReport(True, 0)
    found = decode_state(data, provider, cipher)
    known: dict[str, Any] = {"size": len(data), "encrypted": is_encrypted(data)}
    if isinstance(found, DiscardedState):
        version, name = found.members.get("version"), found.members.get("provider")
        return StateReport(
            False,
            **known,
            reason=found.reason,
            problem=str(found),
            version=version if type(version) is int else None,
            provider=name[:80] if isinstance(name, str) else "",
        )
    return StateReport(
        True,
        **known,
        version=found.version,
        provider=found.provider,
        blocks=len(found.blocks),
        processed_length=found.processed_length,
        responses=len(found.conversation_state.anchors),
        kinds=FrozenMap(Counter(block.kind for block in found.blocks)),
    )
