"""The JSON form of blocks and anchors in state bytes, without repetition.

Content that is one plain text is a member ``text``. The engine's metadata of a block (response, output index,
item id) is a member ``from``, with an index into a list of response ids. An anchor has only the members in which
it differs from the previous one. A block whose members conflict with these is stored in full, under ``as_is``.

Every block is decoded at every call, so common blocks use the direct path of
``kedge.turns.block_codec``. The general functions are ``dump_block`` and ``load_block``.

Encoding starts from the JSON of the previous state, if it is known, because most calls only add to it. Its text is
reused if it is of the same blocks (the same objects, which are immutable) and if every response in it has
the same index as before: a new anchor can shift the indices of responses that have none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from operator import attrgetter, is_
from types import NoneType
from typing import Any, NamedTuple, cast

from kedge.planning import AnchorRecord, TokenCounts
from kedge.planning.anchors import parse_token_counts, unchecked_records
from kedge.text.json_text import encode_text, quote
from kedge.turns import (
    ITEM_ID,
    OUTPUT_INDEX,
    RESPONSE_ID,
    AssistantBlock,
    Block,
    FrozenMap,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
    dump_block,
    load_block,
)
from kedge.turns.block_codec import decode_common
from kedge.turns.frozen_json import EMPTY, check_text, thaw, unchecked_map

Json = dict[str, Any]
ResponseIndex = Callable[[str], int]
"""Returns the index of a response id in the list of responses."""

ENGINE, USER = "engine", "user"
_RESERVED_KEYS = frozenset({"text", "from", "as_is"})
_COMMON_KEYS = frozenset({"kind", "id", "metadata", "origin"})
_MAX_OUTPUT_INDEX = 1_000_000
_PART_KINDS = frozenset({"user", "assistant", "tool_result"})


class EncodedArray(NamedTuple):
    """Blocks or anchors with their JSON, from which longer sequences of them are encoded.

    Attributes:
        items: The blocks or anchors.
        elements: Their JSON, without brackets.
        responses: The index of each response that occurs in it, in the order of its first use.
        last: The values of the last anchor.
    """

    items: tuple[object, ...] = ()
    elements: str = ""
    responses: Mapping[str, int] = EMPTY
    last: tuple[Any, ...] | None = None

    @property
    def text(self) -> str:
        """The JSON array."""
        return f"[{self.elements}]"

    def is_prefix(self, items: tuple[object, ...], response_index: ResponseIndex) -> bool:
        """Return whether the JSON of these items starts with this one."""
        if len(self.items) > len(items) or not all(map(is_, self.items, items)):
            return False
        # Responses that have no index yet get theirs here, in the order in which the items use them.
        return list(map(response_index, self.responses)) == list(self.responses.values())

    def extend(
        self, items: tuple[object, ...], added: list[str], responses: Mapping[str, int]
    ) -> "EncodedArray":
        """Return the array of these items; ``added`` is the JSON of the new items."""
        elements = ",".join([self.elements, *added] if self.elements else added)
        return EncodedArray(items, elements, {**self.responses, **responses})


_NOTHING = EncodedArray()


def encode_blocks(
    blocks: Iterable[Block], response_index: ResponseIndex, before: EncodedArray = _NOTHING
) -> EncodedArray:
    """Return blocks with their JSON; the JSON of the first ones is reused if ``before`` has it."""
    items, responses = tuple(blocks), dict[str, int]()

    def index(response_id: str) -> int:
        responses[response_id] = found = response_index(response_id)
        return found

    known = before if before.is_prefix(items, response_index) else _NOTHING
    added = [_encode_block(block, index) for block in items[len(known.items) :]]
    return known.extend(items, added, responses)


def decode_blocks(forms: Iterable[Json], responses: Sequence[str]) -> list[Block]:
    """Return the blocks of a parsed array of ``encode_blocks``; raise ``ValueError`` or similar if invalid."""
    return [_decode_block(form, responses) for form in forms]


def _encode_block(block: Block, response_index: ResponseIndex) -> str:
    content = _encode_common(block)
    if content is None:
        if isinstance(block, UnknownBlock) or not _RESERVED_KEYS.isdisjoint(block.extra):
            return f'{{"as_is":{encode_text(dump_block(block))}}}'
        content = _encode_generic(block)
    if block.metadata is EMPTY:
        noted = "" if block.origin == USER else f',"origin":{quote(block.origin)}'
    else:
        noted = _encode_metadata(block, response_index)
    return f'{{"kind":"{block.kind}","id":{quote(block.id)}{noted}{content}}}'


def _encode_common(block: Block) -> str | None:
    """Return the members of a common block after its identity, or None for any other block."""
    if block.extra:
        return None
    kind, start = type(block), ""
    if kind is ToolCallBlock:
        call = cast("ToolCallBlock", block)
        if call.custom:
            return None
        what = f',"name":{quote(call.name)},"arguments":{quote(call.arguments)}'
        return f'{what},"call_id":{quote(call.call_id)}'
    if kind is ToolResultBlock:
        result = cast("ToolResultBlock", block)
        if result.custom:
            return None
        start = f',"call_id":{quote(result.call_id)}'
    elif kind is not UserBlock and kind is not AssistantBlock:
        return None
    parts = cast("UserBlock", block).parts
    if len(parts) == 1 and type(part := parts[0]) is TextPart and not part.extra:
        return f'{start},"text":{quote(part.text)}'
    return None


def _encode_metadata(block: Block, response_index: ResponseIndex) -> str:
    """Return metadata and origin; the engine's metadata in its short form."""
    metadata, origin = block.metadata, block.origin
    try:
        response_id, index = metadata[RESPONSE_ID], metadata[OUTPUT_INDEX]
        item_id = metadata[ITEM_ID]
    except KeyError:
        response_id = index = item_id = None
    if type(response_id) is not str or type(index) is not int or type(item_id) is not str:
        origin_json = "" if origin == USER else f',"origin":{quote(origin)}'
        return f'{origin_json},"metadata":{encode_text(thaw(metadata))}'
    origin_json = "" if origin == ENGINE else f',"origin":{quote(origin)}'
    source_json = f',"from":[{response_index(response_id)},{index},{quote(item_id)}]{origin_json}'
    if len(metadata) == 3:
        return source_json
    rest = {k: v for k, v in metadata.items() if k not in (RESPONSE_ID, OUTPUT_INDEX, ITEM_ID)}
    return f'{source_json},"metadata":{encode_text(thaw(FrozenMap(rest)))}'


def _encode_generic(block: Block) -> str:
    """Return the members of this kind of block, and any that Kedge does not interpret."""
    form = dump_block(block)
    members = encode_text({name: form[name] for name in form if name not in _COMMON_KEYS})[1:-1]
    return f",{members}" if members else ""


def _decode_block(form: Json, responses: Sequence[str]) -> Block:
    """Return one block; a block with only common members is decoded directly."""
    try:
        size, noted, origin = len(form), EMPTY, USER
        if "from" in form:
            size, noted, origin = size - 1, _decode_metadata(form["from"], responses), ENGINE
        text = form.get("text")
        block = decode_common(form, size, text, noted, origin)
    except KeyError:
        block = None  # other members than the common ones
    return _decode_generic(form, responses) if block is None else block


def _decode_generic(form: Json, responses: Sequence[str]) -> Block:
    if "kind" not in form:
        return load_block(form["as_is"])
    plain = dict(form)
    if "from" in plain:
        noted = _decode_metadata(plain.pop("from"), responses)
        plain = {"origin": ENGINE, **plain, "metadata": {**noted, **plain.get("metadata", {})}}
    if "text" in plain and plain["kind"] in _PART_KINDS:
        plain["parts"] = [{"type": "text", "text": plain.pop("text")}]
    return load_block(plain)


def _decode_metadata(source: Sequence[Any], responses: Sequence[str]) -> FrozenMap:
    number, index, item_id = source
    if type(number) is not int or number < 0:
        raise ValueError("a block points at no response")
    members = {RESPONSE_ID: responses[number], OUTPUT_INDEX: index, ITEM_ID: item_id}
    plain = (
        type(index) is int
        and index < _MAX_OUTPUT_INDEX
        and type(item_id) is str
        and item_id.isascii()
    )
    return unchecked_map(members) if plain else FrozenMap(members)


def encode_anchors(
    records: Iterable[AnchorRecord], response_index: ResponseIndex, before: EncodedArray = _NOTHING
) -> EncodedArray:
    """Return anchors with their JSON; the JSON of the first ones is reused if ``before`` has it.

    Each has the members in which it differs from the previous one.
    """
    items, responses, added = tuple(records), dict[str, int](), list[str]()
    known = before if before.is_prefix(items, response_index) else _NOTHING
    previous = known.last or _DEFAULTS
    for record in items[len(known.items) :]:
        number = responses[record.response_id] = response_index(record.response_id)
        values = (number, *_anchor_values(record))
        members = [
            f"{name}{_encode_value(value)}"
            for name, value, last in zip(_KEY_PREFIXES, values, previous, strict=True)
            if value is not last and value != last
        ]
        added.append(f"{{{','.join(members)}}}")
        previous = values
    return known.extend(items, added, responses)._replace(last=previous)


def decode_anchors(forms: Iterable[Json], responses: Sequence[str]) -> list[AnchorRecord]:
    """Return the anchors of a parsed array of ``encode_anchors``; raise ``ValueError`` or similar if invalid."""
    members: Json = dict(zip(_ANCHOR_TYPES, _DEFAULTS, strict=True))
    rows: list[tuple[Any, ...]] = []
    for form in forms:
        members.update(form)
        if _DERIVED in form:
            members[_DERIVED] = _decode_texts(form[_DERIVED])
        if _COUNTED in form:
            members[_COUNTED] = parse_token_counts(form[_COUNTED])
        rows.append(tuple(members.values()))
    if not rows:
        return []
    numbers, *columns = zip(*rows, strict=True)
    for column, kinds in zip((numbers, *columns), _ANCHOR_TYPES.values(), strict=True):
        if not kinds.issuperset(map(type, column)):
            raise ValueError("an anchor has a member of another type")
    if min(numbers) < 0:
        raise ValueError("an anchor points at no response")
    return unchecked_records([[responses[number] for number in numbers], *columns])


def _decode_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("an anchor has a member of another type")  # noqa: TRY004 - the bytes are wrong
    return tuple([check_text(each, _DERIVED) for each in cast("list[object]", value)])


def _encode_value(value: object) -> str:
    if type(value) is str:
        return quote(value)
    if type(value) is int:
        return repr(value)
    if type(value) is float:
        return repr(value) if isfinite(value) else "null"  # such as an infinite time
    return encode_text(value)


_RESPONSE, _DERIVED, _COUNTED = "response", "derived", "counted"
_ANCHOR_TYPES: dict[str, frozenset[type]] = {
    _RESPONSE: frozenset({int}),
    "scope": frozenset({str}),
    "digest": frozenset({str}),
    "block_count": frozenset({int}),
    "depth": frozenset({int}),
    "root_created_at": frozenset({int, float}),
    "status": frozenset({str}),
    "stored": frozenset({bool}),
    "created_at": frozenset({int, float}),
    "expires_at": frozenset({int, float, NoneType}),
    "barrier": frozenset({int, NoneType}),
    _DERIVED: frozenset({tuple}),
    _COUNTED: frozenset({TokenCounts, NoneType}),
}
"""The members of an anchor, in the order of the record, and their types."""

_RECORD_FIELDS = {each.name: each for each in fields(AnchorRecord)}
_KEY_PREFIXES = [f"{quote(name)}:" for name in _ANCHOR_TYPES]
_DEFAULTS: tuple[Any, ...] = (
    -1,
    *(_RECORD_FIELDS[name].default for name in list(_ANCHOR_TYPES)[1:]),
)
_anchor_values: Callable[[AnchorRecord], tuple[Any, ...]] = attrgetter(*list(_ANCHOR_TYPES)[1:])
