"""Rewrite a request that replays its history into one that sends only new items.

`kedge.chain` and `kedge proxy` share this module. It has no side effects: it converts a request body to a
request body, and later the response to an index entry.

- The items of `input` become blocks. Unlike in a Turn, system items at the start of `input` are part of the
  context that the server stores, so the digest covers them.
- The longest prefix whose digest is in the index, and whose response may still be used, is left out.
- The rest is sent as a slice of the program's text: values are copied, and never decoded and encoded again.
  `msgspec.Raw` finds where each value ends.
- Reasoning that the anchor already contains is dropped from the slice, because servers reject duplicates.
- A replay may lack members of the model's output that a program need not repeat, such as the ``phase`` of a message
  or the ``namespace`` of a call. One with another value continues no response.

A request that this module cannot interpret is passed through unchanged, with a reason.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from kedge import turns
from kedge._internal.bounded_dict import BoundedDict
from kedge._internal.json_text import decode, encode_escaped, encode_sorted
from kedge._internal.large_json import LARGE_BYTES, MAX_ITEMS, MAX_VALUES, count_values
from kedge.errors import KedgeError
from kedge.events import Outcome
from kedge.planning import DEFAULT_RETENTION, AnchorRecord, TokenCounts, anchors
from kedge.planning.anchor_index import (
    MAX_PREFIXES,
    AnchorIndex,
    IndexedResponse,
    iter_candidates,
    iter_prefix_digests,
)
from kedge.planning.digests import (
    PrefixIndex,
    get_members,
    is_compaction,
    strip_members,
)
from kedge.planning.explain import DOUBT_REASONS
from kedge.planning.selection import AnchorCheck, select_anchor
from kedge.turns import Block, user
from kedge.turns.frozen_json import thaw

MAX_BODY_BYTES = 64 * 1024 * 1024
"""The maximum size of bodies that are read; larger ones are passed through."""
MAX_CACHED_BYTES = 2_048
MAX_CACHED_ITEMS = 16_384
"""The maximum number of cached items, each of at most ``MAX_CACHED_BYTES`` bytes."""
MIN_REPLAY_BYTES = 2_048
MAX_REPLAY_BYTES = 262_144
"""The sizes of inputs that are cached with their text."""
MAX_REPLAYS = 64
"""The maximum number of inputs that are cached with their text."""
REPLAY_KEY_ITEMS = 3
"""The number of items that identify a conversation: instructions, a message and its answer."""

PASS_THROUGH_REASONS: Mapping[str, str] = {
    "not_json": "the body is not one JSON object",
    "too_large": "the body exceeds the maximum size, or number of items or values, that is read",
    "encoded": "the body is compressed or streamed",
    "signed": "the request has a signature or a digest of its body",
    "retry": "the client repeats a request that failed",
    "idempotency_key": "the request has an idempotency key, which belongs to one body",
    "switched_off": "chaining is switched off in the environment",
    "previous_response_id": "the client chains by itself",
    "conversation": "the client uses a conversation object",
    "prompt": "the client uses a stored prompt",
    "not_stored": "the client asked the server not to store the response",
    "background": "the response is generated in the background",
    "item_reference": "the input refers to stored items",
    "compaction": "the input asks the server to compact it",
    "input": "the input has an unknown form",
    "new": "the input continues no earlier response",
    "no_anchor": "no stored response is known to remember a prefix of the input",
    "untrusted": "the server has not shown that it remembers",
    **DOUBT_REASONS,
}
"""All reasons for sending a request as the program wrote it."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The body of a `POST /responses` request, with its input as blocks.

    Attributes:
        members: The text of each member of the body.
        values: The values of the members other than the input.
        items: The text of each input item.
        blocks: One block per input item, tool arguments normalized.
        prefixes: The digests of the blocks.
        blocked: Why the request must not be rewritten; empty if it may be.
    """

    members: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    items: tuple[bytes, ...] = ()
    blocks: tuple[Block, ...] = ()
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    blocked: str = ""

    @property
    def model(self) -> str:
        """The requested model."""
        return str(self.values.get("model") or "")

    @property
    def streaming(self) -> bool:
        """Whether a stream is requested."""
        return self.values.get("stream") is True

    @property
    def previous_response_id(self) -> str:
        """The response that the client chains on; empty if there is none."""
        value = self.values.get("previous_response_id")
        return value if isinstance(value, str) else ""

    @property
    def is_observable(self) -> bool:
        """Whether the response's context is known, so that it can become an anchor."""
        return self.blocked in ("", "previous_response_id", "background")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A request on an anchor, with its new body.

    Attributes:
        content: The body to send.
        anchor: The stored response whose context is left out.
        sent: The blocks that are sent.
    """

    content: bytes
    anchor: IndexedResponse
    sent: tuple[Block, ...]


def parse_request(content: bytes) -> ParsedRequest:
    """Parse the body of a `POST /responses` request, as the program wrote it.

    A request that cannot be parsed is blocked, and has no blocks.
    """
    is_large = len(content) > LARGE_BYTES
    if len(content) > MAX_BODY_BYTES or (is_large and count_values(content) > MAX_VALUES):
        return ParsedRequest(blocked="too_large")
    try:
        members = split_object(content)
        values = {name: decode(text) for name, text in members.items() if name != "input"}
    except (ValueError, RecursionError):
        return ParsedRequest(blocked="not_json")
    text = members.get("input", b"")
    try:
        if text.startswith(b'"'):
            return _build_text_request(members, values, text)
        items = split_array(text)
        if len(items) > MAX_ITEMS:
            return ParsedRequest(members, values, blocked="too_large")
        blocks, prefixes = _read_items(items, len(text))
    except (KedgeError, ValueError, TypeError, RecursionError):
        return ParsedRequest(members, values, blocked="input")
    obstacle = _find_obstacle(values, blocks)
    return ParsedRequest(members, values, items, blocks, prefixes, obstacle)


def _build_text_request(
    members: Mapping[str, bytes], values: Mapping[str, Any], text: bytes
) -> ParsedRequest:
    """Return a request whose input is one text, which is a message of the user."""
    blocks = (normalize_block(user(decode(text))),)
    prefixes = PrefixIndex().extend(blocks)
    return ParsedRequest(members, values, (), blocks, prefixes, _find_obstacle(values, blocks))


_recent_inputs = BoundedDict[tuple[bytes, ...], ParsedRequest](MAX_REPLAYS)
"""The items of recent requests, with their blocks and digests."""
_recent_lock = threading.Lock()


def _read_items(items: tuple[bytes, ...], size: int) -> tuple[tuple[Block, ...], PrefixIndex]:
    """Return the blocks of input items, and their digests.

    The next request of a program that replays its history begins with the same items, which need not
    be read again. Another conversation with the same beginning replaces the entry, which only costs time.
    """
    key = items[:REPLAY_KEY_ITEMS]
    with _recent_lock:
        recent = _recent_inputs.get(key, ParsedRequest())
    reused = _count_equal(items, recent.items)
    blocks = recent.blocks[:reused] + tuple(map(_read_block, items[reused:]))
    prefixes = recent.prefixes.rebuild(blocks, reused)
    if MIN_REPLAY_BYTES < size <= MAX_REPLAY_BYTES:
        with _recent_lock:
            _recent_inputs[key] = ParsedRequest(items=items, blocks=blocks, prefixes=prefixes)
    return blocks, prefixes


def _count_equal(items: tuple[bytes, ...], recent: tuple[bytes, ...]) -> int:
    """Return the number of items with which both inputs begin."""
    if items[: len(recent)] == recent:
        return len(recent)
    for position, (item, recent_item) in enumerate(zip(items, recent, strict=False)):
        if item != recent_item:
            return position
    return len(items)


def _read_block(text: bytes) -> Block:
    """Return the block of an input item, from a cache if the item is short.

    A program that replays its history writes the same items in every request, and parsing them is most of
    the work. A cached block also has its digest.
    """
    if len(text) <= MAX_CACHED_BYTES:
        return _read_cached_block(text)
    return _parse_block(text)


@lru_cache(maxsize=MAX_CACHED_ITEMS)
def _read_cached_block(text: bytes) -> Block:
    return _parse_block(text)


def _parse_block(text: bytes) -> Block:
    return normalize_block(turns.block_from_item(decode(text)))


def _find_obstacle(values: Mapping[str, Any], blocks: tuple[Block, ...]) -> str:
    """Return the reason why the request must be sent as written, or an empty string."""
    if values.get("conversation") is not None:
        return "conversation"
    if anchors.has_hidden_context({"prompt": values.get("prompt")}):
        return "prompt"
    if values.get("store") is False:
        return "not_stored"
    kinds = {block.type for block in blocks if isinstance(block, turns.OpaqueBlock)}
    if "item_reference" in kinds:
        return "item_reference"
    if "compaction_trigger" in kinds:
        return "compaction"
    if values.get("previous_response_id") is not None:
        return "previous_response_id"
    if values.get("background") is True:
        return "background"
    return ""


def normalize_block(block: Block) -> Block:
    """Return the block in the form in which it is compared.

    Tool arguments are normalized, because frameworks parse and encode them before they replay them. For the same
    reason members of the model's output such as ``phase`` are compared separately: a replay may lack them. Unknown
    members of the program's own items, such as the name of a user, are compared with the rest.
    """
    if isinstance(block, turns.ToolCallBlock) and not block.custom:
        block = structs.replace(block, arguments=normalize_json(block.arguments))
    if isinstance(block, turns.AssistantBlock | turns.ToolCallBlock):
        members = get_members(block)
        block = strip_members(block)
        if members:
            block = block.with_metadata({_MEMBERS: members})
    return block


def _hash_members(blocks: Iterable[Block], start: int = 0) -> frozenset[str]:
    """Return the members of the model's output that a replay may lack, each with its position and a hash."""
    covered = (block for block in blocks if not isinstance(block, turns.ReasoningBlock))
    return frozenset(
        f"{position} {name} {hashlib.sha256(encode_sorted(thaw(value))).hexdigest()[:16]}"
        for position, block in enumerate(covered, start)
        if _MEMBERS in block.metadata
        for name, value in block.metadata[_MEMBERS].items()
    )


def rewrite(
    request: ParsedRequest,
    index: AnchorIndex,
    *,
    scope: str,
    now: float,
    max_depth: int | None = None,
    not_before: float = 0.0,
) -> Rewritten | str:
    """Leave out the part of the input that is provably the context of a stored response.

    Args:
        request: The request as the program wrote it.
        index: Known responses by content.
        scope: The endpoint and account of the request.
        now: The current Unix time.
        max_depth: The number of responses of a chain that this server passes to the model, if it is limited.
        not_before: Responses that were created earlier are not used.

    Returns:
        The new request, or the reason for sending the one that the program wrote.
    """
    entries: dict[AnchorRecord, IndexedResponse] = {}

    def iter_records() -> Iterator[AnchorRecord]:
        for entry in iter_candidates(index, scope, _iter_digests(request)):
            if not _contradicts(request, entry):
                entries[entry.record] = entry
                yield entry.record

    if next(_iter_digests(request), None) is None:
        return "new"
    check = AnchorCheck(request.prefixes, scope, now, max_depth, not_before)
    record, _ = select_anchor(iter_records(), check)
    if record is None:
        return "no_anchor"
    return _send_rest(request, entries[record]) or "no_anchor"


def _contradicts(request: ParsedRequest, entry: IndexedResponse) -> bool:
    """Return whether the replay of a context has members of the model's output that the response had not."""
    covered = min(entry.record.block_count, request.prefixes.covered)
    context = request.blocks[: request.prefixes.end_position(covered)]
    return not _hash_members(context).issubset(entry.members)


def _send_rest(request: ParsedRequest, anchor: IndexedResponse) -> Rewritten | None:
    """Return the request with the items after its anchor; None if none is left."""
    start = request.prefixes.end_position(anchor.record.block_count)
    texts: list[bytes] = []
    blocks: list[Block] = []
    for text, block in zip(request.items[start:], request.blocks[start:], strict=True):
        if isinstance(block, turns.ReasoningBlock) and block.item_id in anchor.reasoning_ids:
            continue
        texts.append(text)
        blocks.append(block)
    if not blocks:
        return None
    members = {
        **request.members,
        "previous_response_id": encode_escaped(anchor.record.response_id),
        "input": b"[%b]" % b",".join(texts),
    }
    return Rewritten(join_object(members), anchor, tuple(blocks))


def find_shorter(request: ParsedRequest, index: AnchorIndex, anchor: IndexedResponse) -> list[str]:
    """Return the ids of the known responses whose context is a prefix of the anchor's context, or equal to it."""
    record = anchor.record
    digests = islice(_iter_digests(request, record.block_count), MAX_PREFIXES)
    entries = index.find(record.scope, list(digests))
    return [entry.record.response_id for entry in entries]


_MEMBERS = "members"
"""The metadata key of the members that a normalized block does not have."""
_OUTPUT_BLOCKS = (turns.AssistantBlock, turns.ToolCallBlock, turns.OpaqueBlock)


def _iter_digests(request: ParsedRequest, longest: int | None = None) -> Iterator[str]:
    """Yield the digests of the prefixes that may be the context of a response, the longest first.

    A response ends with an output item, and something is left to send after it, because servers reject an empty input.
    """

    def can_end(position: int) -> bool:
        is_within = 0 < position < len(request.blocks)
        return is_within and isinstance(request.blocks[position - 1], _OUTPUT_BLOCKS)

    return iter_prefix_digests(request.prefixes, longest=longest, can_end=can_end)


def index_response(
    request: ParsedRequest,
    outcome: Outcome,
    *,
    scope: str,
    now: float,
    parent: IndexedResponse | None = None,
    retention: float | None = DEFAULT_RETENTION,
    counted: TokenCounts | None = None,
) -> IndexedResponse | None:
    """Return the index entry of a response.

    Args:
        request: The request as the program wrote it.
        outcome: The decoded response.
        scope: The endpoint and account of the request.
        now: The current Unix time.
        parent: The response that the request was chained on, by Kedge or by the client itself.
        retention: The seconds for which the server stores a response; None if it does not expire.
        counted: The server's token counts for it.

    Returns:
        The entry for the index, or None if the context that the server stores is unknown.
    """
    # A response that is generated in the background becomes an anchor when a later GET shows its output.
    is_cut = outcome.status == "cut" and request.values.get("background") is True
    is_pending = outcome.status == "running" or is_cut
    if not (is_pending and outcome.response_id) and not _is_usable(outcome):
        return None
    if not request.is_observable:
        return None
    prefixes = request.prefixes
    base = 0
    if request.previous_response_id:
        if parent is None or parent.record.status != "completed":
            return None
        base = parent.record.block_count
        prefixes = _continue_digest(parent.record, request.blocks)

    record = AnchorRecord(
        response_id=outcome.response_id,
        scope=scope,
        digest=prefixes.digest(prefixes.covered),
        block_count=base + prefixes.covered,
        status="incomplete",
        depth=1,
        root_created_at=now,
        created_at=now,
        expires_at=None if retention is None else now + retention,
        counted=counted,
    )
    members = _hash_members(request.blocks, base)
    if parent is not None:
        record = structs.replace(
            record,
            depth=parent.record.depth + 1,
            root_created_at=parent.record.root_created_at,
        )
        members |= parent.members
    pending = IndexedResponse(record, members=members)
    if is_pending:
        return pending
    return complete_response(pending, outcome)


def complete_response(pending: IndexedResponse, outcome: Outcome) -> IndexedResponse | None:
    """Add the output of a response to the entry of its request.

    Args:
        pending: The entry of the request.
        outcome: The decoded response.

    Returns:
        The entry for the index, or None if the response cannot be used.
    """
    if not _is_usable(outcome) or outcome.response_id != pending.record.response_id:
        return None
    output = [normalize_block(block) for block in outcome.blocks]
    prefixes = _continue_digest(pending.record, output)
    record = structs.replace(
        pending.record,
        digest=prefixes.digest(prefixes.covered),
        block_count=pending.record.block_count + prefixes.covered,
        status="completed",
    )
    reasoning_ids = frozenset(
        block.item_id
        for block in output
        if isinstance(block, turns.ReasoningBlock) and block.item_id
    )
    members = pending.members | _hash_members(output, pending.record.block_count)
    return IndexedResponse(record, reasoning_ids, members)


def _is_usable(outcome: Outcome) -> bool:
    """Return whether a response can become an anchor."""
    if not (outcome.completed and outcome.response_id and outcome.blocks):
        return False
    if outcome.anchor_problem or outcome.stored is False:
        return False
    # The server's context then starts at the compaction; the next replay starts a new chain.
    return not any(map(is_compaction, outcome.blocks))


def _continue_digest(record: AnchorRecord, blocks: Sequence[Block]) -> PrefixIndex:
    """Return an index of the blocks after the context of a record, whose digests continue that of the record."""
    return PrefixIndex(bytes.fromhex(record.digest.partition(":")[2])).extend(blocks)


# Split JSON into the text of its values.

T = TypeVar("T")
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_MEMBER_START = re.compile(rb'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_ELEMENT_START = re.compile(rb"\s*[\[,]\s*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_STRING_OR_SPACE = re.compile(r'"(?:[^"\\]|\\.)*"|[ \t\n\r]+')


def split_object(content: bytes) -> dict[str, bytes]:
    """Return the text of each member of a JSON object, as it is written.

    Raises:
        ValueError: The text is not one JSON object in UTF-8, or a member occurs twice.
        RecursionError: It is nested too deep.
    """
    content.decode()  # msgspec does not check the encoding of raw values
    raw_members, masked = _decode(_decode_object, content)
    members: dict[str, bytes] = {}
    position = 0
    # Of members with the same name msgspec returns the last value, so that some text is left over here.
    for value in map(bytes, raw_members.values()):
        start = _MEMBER_START.match(masked, position)
        if start is None or not masked.startswith(value, start.end()):
            raise ValueError("two members have the same name")
        position = start.end() + len(value)
        name = json.loads(content[start.start(1) : start.end(1)])
        members[name] = content[start.end() : position]
    if b"".join(masked[position:].split()) not in (b"}", b"{}"):
        raise ValueError("two members have the same name")
    return members


def split_array(content: bytes) -> tuple[bytes, ...]:
    """Return the text of each element of a JSON array, as it is written.

    Raises:
        ValueError: The text is not a JSON array.
    """
    raw_elements, masked = _decode(_decode_array, content)
    elements = tuple(map(bytes, raw_elements))
    if masked is content:
        return elements
    originals: list[bytes] = []
    position = 0
    for element in elements:
        start = _ELEMENT_START.match(masked, position)
        if start is not None:
            position = start.end()
        end = position + len(element)
        originals.append(content[position:end])
        position = end
    return tuple(originals)


def _decode(decode: Callable[[bytes], T], content: bytes) -> tuple[T, bytes]:
    """Return the raw values in a text, and the text in which they were found.

    msgspec rejects a lone surrogate. Then this is a text of the same length with other escapes.
    """
    try:
        return decode(content), content
    except msgspec.DecodeError:
        masked = _SURROGATE.sub(rb"\\ue000", content)
        return decode(masked), masked


def join_object(members: Mapping[str, bytes]) -> bytes:
    """Return a JSON object with members of these texts."""
    return b"{%b}" % b",".join(
        encode_escaped(name) + b":" + value for name, value in members.items()
    )


def normalize_json(text: str) -> str:
    """Return JSON text in a compact form that retains the order of members and the spelling of numbers.

    Two texts that differ only in whitespace or in how characters are escaped become equal. Text that is
    not JSON is returned unchanged.
    """
    try:
        json.loads(text)
    except ValueError:
        return text
    return _STRING_OR_SPACE.sub(_normalize_token, text)


def _normalize_token(token: re.Match[str]) -> str:
    """Return a string as `json.dumps` writes it, and nothing for whitespace."""
    if not token[0].startswith('"'):
        return ""
    return json.dumps(json.loads(token[0]))
