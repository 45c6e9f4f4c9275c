"""The JSON form of a Turn: versioned, lossless and documented (docs/json-form.md).

Parsing is strict about known fields and accepts unknown ones: fields and kinds of a newer version are stored and
written again; anything malformed is an ``InvalidJSON`` with the path of the invalid member. A Turn is parsed
completely or not at all.
"""

import json
from typing import Any, cast

from kedge.errors import InvalidJSON
from kedge.turns.block_codec import (
    JsonObject,
    dump_block,
    encode_json,
    is_plain,
    load_block,
    name_type,
    read_map,
    read_object,
    upgrade_block,
)
from kedge.turns.blocks import Block
from kedge.turns.frozen_json import MAX_INTEGER_BITS, FrozenMap, check_text, path_step, thaw
from kedge.turns.turn import TURN_MEMBERS, Turn

MAX_DIGITS = len(str(1 << MAX_INTEGER_BITS))


class InvalidValue:
    """Replaces an invalid value in parsed JSON until its path is known."""

    __slots__ = ("problem", "step")

    def __init__(self, problem: str, member: str | None = None) -> None:
        self.problem = problem
        self.step = "" if member is None else path_step(member)


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


def _find_invalid_value(value: object) -> InvalidJSON | None:
    """Return the error of an invalid value in parsed JSON, if there is one."""
    remaining: list[tuple[str, object]] = [("$", value)]
    while remaining:
        path, value = remaining.pop()
        if isinstance(value, InvalidValue):
            return InvalidJSON(path + value.step, value.problem)
        if isinstance(value, dict):
            members = cast("dict[str, object]", value).items()
            remaining += [(path + path_step(name), member) for name, member in members]
        elif isinstance(value, list):
            elements = enumerate(cast("list[object]", value))
            remaining += [(f"{path}[{index}]", element) for index, element in elements]
    return None


VERSION = 2
FORMAT = "kedge.turn"


def dumps(turn: Turn) -> str:
    """Encode a Turn as JSON text.

    Args:
        turn: The Turn.

    Returns:
        The text, which ``loads`` parses.
    """
    blocks = [block if is_plain(block) else dump_block(block) for block in turn.blocks]
    return encode_json({**_dump_members(turn), "blocks": blocks, **turn.extra}).decode()


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
    value = parse_json(text)
    try:
        return load(value)
    except InvalidJSON as error:
        raise _find_invalid_value(value) or error from None


def dump(turn: Turn) -> JsonObject:
    """Encode a Turn as plain JSON values.

    Args:
        turn: The Turn.

    Returns:
        A dict, which ``load`` parses.
    """
    blocks = [dump_block(block) for block in turn.blocks]
    return {**_dump_members(turn), "blocks": blocks, **thaw(turn.extra)}


def _dump_members(turn: Turn) -> JsonObject:
    data = {"data": thaw(turn.data)} if turn.data else {}
    return {"format": FORMAT, "version": VERSION, "id": turn.id, **data}


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
    _check_version(form.get("version"))
    rest = {name: member for name, member in form.items() if name not in TURN_MEMBERS}
    return Turn(
        _load_blocks(form),
        id=_read_id(form["id"]) if "id" in form else "",
        data=_read_data(form["data"]) if "data" in form else {},
        extra=read_map(rest),
    )


def _load_blocks(form: JsonObject) -> list[Block]:
    if "blocks" not in form:
        raise InvalidJSON(".blocks", "missing")
    if not isinstance(form["blocks"], list):
        raise InvalidJSON(".blocks", f"expected an array, got {name_type(form['blocks'])}")
    forms = cast("list[object]", form["blocks"])
    if form["version"] == 1:
        forms = [upgrade_block(each) for each in forms]
    blocks = [load_block(each, f".blocks[{index}]") for index, each in enumerate(forms)]
    seen: dict[str, int] = {}
    for index, block in enumerate(blocks):
        first = seen.setdefault(block.id, index)
        if first != index:
            raise InvalidJSON(f".blocks[{index}].id", f"the same id as $.blocks[{first}]")
    return blocks


def _read_id(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidJSON(".id", f"expected a string, got {name_type(value)}")
    if not value:
        raise InvalidJSON(".id", "expected an id, got an empty string")
    return check_text(value, ".id")


def _read_data(value: object) -> FrozenMap:
    try:
        return read_map(value)
    except InvalidJSON as error:
        raise error.prefix_path(".data") from None


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidJSON(".version", "expected a positive integer")
    if version > VERSION:
        raise InvalidJSON(
            ".version",
            f"written by a newer version of Kedge (form {version}, this one reads {VERSION}); upgrade Kedge",
        )
