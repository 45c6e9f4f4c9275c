"""State bytes: a complete conversation as one opaque value that the caller stores.

    {"version":3,"provider":…,"blocks":[…],"processed_length":…,"memory":{…},"id":…,"data":{…},"checksum":"sha256:…"}

The checksum comes last and covers every byte before it, so changes are detected. Reading never raises: a
state that cannot be used becomes a ``DiscardedState`` with the reason. A history is never used in part, except that
blocks which the engine cannot send are left out (``leave_out``): a state must never make every later call fail.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Literal, cast

import msgspec
from msgspec import structs

from kedge._internal.display import pluralize
from kedge._internal.encryption import FernetCipher, Key, new_key
from kedge._internal.json_text import decode, encode, reject_constant
from kedge.errors import KedgeError
from kedge.observe import get_logger
from kedge.planning import ConversationState, get_state, set_state
from kedge.planning.anchors import STATE_KEY
from kedge.turns import Block, Turn, dump_block, item_from_block, load_block
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text
from kedge.turns.json_codec import decode_special, encode_json, is_plain
from kedge.turns.turn import count_leading
from kedge.wire.chat_messages import blocks_from_message

log = get_logger("kedge.conversation")

__all__ = ["ENCRYPTED_PREFIX", "FernetCipher", "Key", "is_encrypted", "new_key"]

ENCRYPTED_PREFIX = b"gAAAAA"
"""The first bytes of every encrypted state: Fernet's version and the high bytes of its time."""


def is_encrypted(data: bytes) -> bool:
    """Return whether these bytes are an encrypted state."""
    return data.startswith(ENCRYPTED_PREFIX)


VERSION = 3
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


Json = dict[str, Any]


_NO_MEMORY = ConversationState()


class _Derived:
    """Values of a state that are not part of its bytes, and not compared.

    ``_history`` is the Turn of the state, without leading system blocks; it has the digests of the blocks. ``_encoded``
    is the JSON of the blocks.
    """

    __slots__ = ("_encoded", "_history", "_imported")


class ChatState(
    msgspec.Struct,
    _Derived,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="version",
    tag=VERSION,
):
    """The content of state bytes.

    ``blocks`` is the conversation without leading system blocks; a model has read the first
    ``processed_length`` of them, the others are pending. ``memory`` has the anchors.
    """

    provider: str
    blocks: tuple[Block, ...] = ()
    processed_length: int = 0
    memory: ConversationState = _NO_MEMORY
    id: str = ""
    data: FrozenMap = EMPTY

    @property
    def is_imported(self) -> bool:
        """Whether this is the history of another program."""
        return getattr(self, "_imported", False)

    def turn(self, leading: tuple[Block, ...] = (), following: tuple[Block, ...] = ()) -> Turn:
        """Return the Turn to send: leading blocks, the history, and the new blocks."""
        turn: Turn | None = getattr(self, "_history", None)
        if turn is None:
            turn = Turn(self.blocks, id=self.id, data=self.data)
            turn = set_state(turn, self.memory)
        if leading:
            turn = turn.insert(0, *leading)
        return turn.append(*following)


_decode = msgspec.json.Decoder(ChatState, dec_hook=decode_special).decode


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
        detail = f" ({self.detail})" if self.detail else ""
        return f"{DISCARD_REASONS[self.reason]}{detail}"


def encode_state(state: ChatState, earlier: ChatState | None = None) -> bytes:
    """Return the bytes of a state; blocks that it has in common with an earlier state are not encoded again."""
    blocks = _encode_blocks(state, earlier)
    members = structs.replace(state, blocks=())
    if state.memory == _NO_MEMORY:
        members = structs.replace(members, memory=_NO_MEMORY)  # only the same object is omitted
    # The blocks are put between the provider and the other members, where the struct has them.
    head = encode_json(ChatState(state.provider))[:-1]
    rest = encode_json(members)[len(head) : -1]
    parts = [head, rest]
    if blocks:
        parts = [head, b',"blocks":[', blocks, b"]", rest]
    covered = b"".join(parts)
    return covered + _format_checksum(covered)


def _encode_blocks(state: ChatState, earlier: ChatState | None) -> bytes:
    """Return the blocks of a state as JSON, separated by commas."""
    encoded = b""
    encoded_length = 0
    if earlier is not None and _continues(state, earlier):
        encoded = getattr(earlier, "_encoded", b"")
        encoded_length = len(earlier.blocks) if encoded else 0
    added = [_to_encodable(block) for block in state.blocks[encoded_length:]]
    if added:
        encoded_blocks = encode_json(added)[1:-1]
        encoded = b",".join(filter(None, (encoded, encoded_blocks)))
    structs.force_setattr(state, "_encoded", encoded)
    return encoded


def _continues(state: ChatState, earlier: ChatState) -> bool:
    """Return whether a state begins with the same block objects as an earlier one."""
    is_long_enough = len(earlier.blocks) <= len(state.blocks)
    return is_long_enough and all(map(is_, earlier.blocks, state.blocks))


def _to_encodable(block: Block) -> object:
    """Return what is encoded as the JSON of a block."""
    return block if is_plain(block) else dump_block(block)


def _format_checksum(covered: bytes) -> bytes:
    """Return the last member of a state, and its end."""
    digest = hashlib.sha256(covered).hexdigest().encode()
    return b"".join((_CHECKSUM_PREFIX, digest, _CHECKSUM_SUFFIX))


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


def decode_state(
    data: bytes, provider: str | None, cipher: FernetCipher | None = None
) -> ChatState | DiscardedState:
    """Decode state bytes, of any provider if ``provider`` is None. Never raises."""
    if is_encrypted(data):
        if cipher is None:
            return DiscardedState("encrypted")
        decrypted = cipher.decrypt(data)
        if decrypted is None:
            return DiscardedState("wrong_key")
        data = decrypted
    if has_valid_checksum(data):
        try:
            state = _check_state(_decode(data[:-_CHECKSUM_LENGTH] + b"}"))
        except (ValueError, RecursionError):
            pass  # the reason is found below, or members of blocks that are not known here
        else:
            if provider in (None, state.provider):
                return state
    return _decode_members(data, provider)


def _decode_members(data: bytes, provider: str | None) -> ChatState | DiscardedState:
    """Return an imported history, a state with blocks of a newer Kedge, or the reason to discard the bytes."""
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
    if version == VERSION and not has_valid_checksum(data):
        return DiscardedState("damaged", "", members)
    if provider is not None and members.get("provider") != provider:
        return DiscardedState("provider", _read_provider(members) or "not named", members)
    try:
        encode(members)  # which rejects lone surrogates
        if version == MESSAGES_VERSION:
            return import_messages(members)
        return _convert(members)
    except (KedgeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return DiscardedState("malformed", type(error).__name__, members)


def _convert(members: Json) -> ChatState:
    """Return the state of its members, with blocks that this version of Kedge does not know."""
    fields = {name: member for name, member in members.items() if name != "checksum"}
    blocks = [load_block(form) for form in cast("list[object]", fields.pop("blocks", ()))]
    state = msgspec.convert(fields, ChatState, dec_hook=decode_special)
    return _check_state(structs.replace(state, blocks=tuple(blocks)))


def _check_state(state: ChatState) -> ChatState:
    if not 0 <= state.processed_length <= len(state.blocks):
        raise ValueError("processed_length is not a number of blocks")
    if len({block.id for block in state.blocks}) != len(state.blocks):
        raise ValueError("two blocks have one id")
    return state


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


def has_valid_checksum(data: bytes) -> bool:
    """Return whether the checksum at the end matches all bytes before it."""
    covered = data[:-_CHECKSUM_LENGTH]
    checksum = data[-_CHECKSUM_LENGTH:]
    return checksum == _format_checksum(covered)


def state_from_turn(turn: Turn, provider: str, processed_length: int) -> ChatState:
    """Return the state of a Turn: everything except its leading system blocks.

    Args:
        turn: The Turn.
        provider: The provider that the state belongs to.
        processed_length: The number of blocks of the state that a model has read.
    """
    data = FrozenMap({name: value for name, value in turn.data.items() if name != STATE_KEY})
    history = turn.remove(*(block.id for block in turn.leading))
    memory = get_state(turn)
    state = ChatState(provider, history.blocks, processed_length, memory, turn.id, data)
    if not turn.extra:  # which is not stored, so that the next call must not have it either
        structs.force_setattr(state, "_history", set_state(history, memory))
    return state


def _read_provider(members: Mapping[str, Any]) -> str:
    name = members.get("provider")
    if not isinstance(name, str):
        return ""
    return name[:80]


def import_messages(members: Json) -> ChatState:
    """Return the state of a list of messages, without its leading system messages.

    The messages are items of the Responses API or messages of the Chat Completions API, in any mixture. Any other
    message makes the state unusable: if it were passed on, the provider would reject it at every call, and the
    conversation could never continue.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The messages cannot be converted.
    """
    messages = members["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, cast("list[object]", messages))):
        raise ValueError("messages are objects with a role or a type")
    blocks_of_messages = [blocks_from_message(message) for message in cast("list[Json]", messages)]
    processed = members["processed_length"]
    if type(processed) is not int or not 0 <= processed <= len(blocks_of_messages):
        raise ValueError("processed_length is not a number of messages")
    processed_blocks = sum(map(len, blocks_of_messages[:processed]))
    blocks = list(chain.from_iterable(blocks_of_messages))
    _check_items([item_from_block(block) for block in blocks if block.kind != "reasoning"])
    lead = count_leading(blocks)
    provider = check_text(members["provider"], "provider")
    state = ChatState(provider, tuple(blocks[lead:]), max(0, processed_blocks - lead))
    structs.force_setattr(state, "_imported", True)
    return state


def _check_items(items: list[Json]) -> None:
    """Reject items that the Responses API rejects: a member is missing or has an invalid value."""
    from kedge.server.errors import ApiError  # slow to import, and few states are imported
    from kedge.server.schema.items import ITEMS

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
    return structs.replace(state, blocks=blocks, processed_length=length)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and ("role" in message or "type" in message)


class StateReport(msgspec.Struct, frozen=True):
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
    state = decode_state(data, provider, cipher)
    if isinstance(state, DiscardedState):
        version = state.members.get("version")
        return StateReport(
            False,
            len(data),
            reason=state.reason,
            problem=str(state),
            encrypted=is_encrypted(data),
            version=version if type(version) is int else None,
            provider=_read_provider(state.members),
        )
    return StateReport(
        True,
        len(data),
        encrypted=is_encrypted(data),
        version=MESSAGES_VERSION if state.is_imported else VERSION,
        provider=state.provider,
        blocks=len(state.blocks),
        processed_length=state.processed_length,
        responses=len(state.memory.anchors),
        kinds=FrozenMap(Counter(block.kind for block in state.blocks)),
    )
