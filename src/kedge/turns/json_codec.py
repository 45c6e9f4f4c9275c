"""The JSON form of a Turn: versioned, lossless and documented (docs/json-form.md).

Parsing is strict about known fields and accepts unknown ones: fields and kinds of a newer version are stored and
written again; anything malformed is an ``InvalidJSON`` with the path of the invalid member. A Turn is parsed
completely or not at all.
"""

import json
from typing import Any

from kedge.errors import InvalidJSON
from kedge.text.json_text import encode_text, quote
from kedge.turns.block_codec import (
    JsonObject,
    decode_block,
    dump_block,
    encode_block,
    read_array,
    read_at,
    read_id,
    read_map,
    read_object,
)
from kedge.turns.blocks import Block
from kedge.turns.frozen_json import MAX_INTEGER_BITS, InvalidValue, thaw
from kedge.turns.turn import TURN_MEMBERS, Turn

MAX_DIGITS = len(str(1 << MAX_INTEGER_BITS))


def parse_json(text: str | bytes) -> object:
    """Parse JSON text; the result may contain an ``InvalidValue``, which ``load`` rejects."""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON("$", f"expected JSON text, got {type(text).__name__}")
    try:
        return _decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise InvalidJSON("$", "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON("$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJSON("$", f"not JSON: {error.msg} at character {error.pos}") from None


def _parse_constant(name: str) -> InvalidValue:
    return InvalidValue(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int | InvalidValue:
    if len(digits) > MAX_DIGITS + 1:  # and a sign
        return InvalidValue(f"an integer of more than {MAX_INTEGER_BITS} bits")
    return int(digits)


def _parse_float(literal: str) -> float | InvalidValue:
    """Parse a fraction as the nearest double; overflow and underflow are invalid."""
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        return InvalidValue("the number is too large")
    if value == 0 and literal.lower().partition("e")[0].strip("-0."):
        return InvalidValue("the number is too small")
    return value


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | InvalidValue:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    return InvalidValue("given twice", twice)


_decode = json.JSONDecoder(
    object_pairs_hook=_parse_object,
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=_parse_constant,
).decode


VERSION = 1
FORMAT = "kedge.turn"
_HEADER = f'{{"format":"{FORMAT}","version":{VERSION},'


def dumps(turn: Turn) -> str:
    """Encode a Turn as JSON text.

    Args:
        turn: The Turn.

    Returns:
        The text, which ``loads`` parses.
    """
    data = f',"data":{encode_text(thaw(turn.data))}' if turn.data else ""
    blocks = ",".join([encode_block(block) for block in turn.blocks])
    extra = f",{encode_text(thaw(turn.extra))[1:-1]}" if turn.extra else ""
    return f'{_HEADER}"id":{quote(turn.id)}{data},"blocks":[{blocks}]{extra}}}'


def loads(text: str | bytes) -> Turn:
    """Parse a Turn from JSON text.

    Anchors in the text are as trustworthy as its source; see ``kedge.planning.drop_anchors``.

    Args:
        text: The output of ``dumps``.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the text is malformed; ``path`` names the invalid member.
    """
    return load(parse_json(text))


def dump(turn: Turn) -> JsonObject:
    """Encode a Turn as plain JSON values.

    Args:
        turn: The Turn.

    Returns:
        A dict, which ``load`` parses.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": turn.id,
        **({"data": thaw(turn.data)} if turn.data else {}),
        "blocks": [dump_block(block) for block in turn.blocks],
        **thaw(turn.extra),
    }


def load(value: object) -> Turn:
    """Parse a Turn from plain JSON values.

    Args:
        value: The output of ``dump``.

    Returns:
        The Turn.

    Raises:
        InvalidJSON: If the value is malformed; ``path`` names the invalid member.
    """
    try:
        return _load_turn(value)
    except InvalidJSON as error:
        raise error.prefix_path("$") from None


def _load_turn(value: object) -> Turn:
    form = read_object(value)
    if form.get("format") != FORMAT:
        raise InvalidJSON(".format", f"expected {FORMAT!r}")
    read_at(".version", _check_version, form.get("version"))
    if "blocks" not in form:
        raise InvalidJSON(".blocks", "missing")
    blocks = read_at(".blocks", read_array, form["blocks"], decode_block)
    _check_ids(blocks)
    return Turn(
        blocks,
        id=read_at(".id", read_id, form["id"]) if "id" in form else "",
        data=read_at(".data", read_map, form["data"]) if "data" in form else {},
        extra=read_map({name: member for name, member in form.items() if name not in TURN_MEMBERS}),
    )


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON("", "expected a positive integer")
    if version > VERSION:
        raise InvalidJSON(
            "",
            f"written by a newer version of Kedge (form {version}, this one reads {VERSION}); upgrade Kedge",
        )


def _check_ids(blocks: tuple[Block, ...]) -> None:
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = seen.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f".blocks[{index}].id", f"the same id as $.blocks[{first}]")
