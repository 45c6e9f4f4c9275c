"""The JSON form of Turns: exact round trips, strict parsing, and errors with the path of the invalid member."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from for_each import for_each
from kedge.errors import InvalidJSON
from kedge.turns import (
    Block,
    OpaquePart,
    Turn,
    UnknownBlock,
    UserBlock,
    assistant,
    dump,
    dump_block,
    dumps,
    load,
    load_block,
    loads,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from kedge.turns.frozen_json import FrozenMap, json_equal, path_step
from kedge.turns.json_codec import parse_json
from strategies import json_values, sample_blocks, scale_examples, turns

Path = tuple[str | int, ...]


def assert_identical(one: Turn, other: Turn) -> None:
    """Assert that two Turns are equal, including ids, metadata, origins and extra members."""
    assert one == other
    assert (one.id, one.data, one.extra) == (other.id, other.data, other.extra)
    for left, right in zip(one, other, strict=True):
        assert type(left) is type(right)
        for name in ("id", "metadata", "origin", "source", "extra"):
            assert getattr(left, name) == getattr(right, name)
        parts = zip(getattr(left, "parts", ()), getattr(right, "parts", ()), strict=True)
        assert all(own.extra == theirs.extra for own, theirs in parts)
        if hasattr(left, "item"):
            assert left.item == right.item  # pyright: ignore[reportAttributeAccessIssue]


@given(turns())
def test_turn_json_round_trip(turn: Turn) -> None:
    """Everything is unchanged after a round trip, and dumping again changes nothing, not even the order."""
    text = dumps(turn)
    assert_identical(loads(text), turn)
    assert_identical(loads(text.encode()), turn)
    assert_identical(load(dump(turn)), turn)
    assert_identical(load(json.loads(json.dumps(dump(turn)))), turn)
    for block in turn:
        restored = load_block(dump_block(block))
        assert_identical(Turn([restored], id="t"), Turn([block], id="t"))
    assert dumps(loads(text)) == text
    shuffled = json.dumps(json.loads(text), sort_keys=True)
    assert json_equal(json.loads(dumps(loads(shuffled))), json.loads(text))


def containers(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return every object and array in a value, with its path."""
    paths: list[tuple[Path, Any]] = []
    if isinstance(value, dict | list):
        paths.append((path, value))
        members = value.items() if isinstance(value, dict) else enumerate(value)
        paths += [each for key, member in members for each in containers(member, (*path, key))]
    return paths


@given(turns(max_size=2), st.data())
def test_unknown_members_are_preserved_at_every_level(turn: Turn, data: st.DataObject) -> None:
    """A member from a newer Kedge in any object of the JSON form is preserved in a round trip."""
    form = dump(turn)
    objects = [each for _, each in containers(form) if isinstance(each, dict)]
    for chosen in data.draw(st.lists(st.sampled_from(objects), min_size=1, max_size=2)):
        name = data.draw(st.sampled_from(["x_new", "x new", "extra", "leaf"]))
        chosen[name] = data.draw(json_values())
    loaded = load(form)
    assert json_equal(dump(loaded), form)
    assert loaded.blocks[: len(turn)] == load(json.loads(json.dumps(form))).blocks


@for_each("block", sample_blocks())
def test_blocks_and_parts_of_unknown_kinds_are_preserved(block: Block) -> None:
    """The position, content and local id of unknown blocks and parts are preserved."""
    form = dump_block(block)
    if "parts" in form:
        form["parts"].insert(1, {"type": "hologram", "frames": [1, None], "text": "x"})
    form = {**form, "kind": "dream"}
    loaded = load_block(form)
    assert isinstance(loaded, UnknownBlock)
    assert loaded.id == block.id
    assert dump_block(loaded) == form
    part = {"type": "hologram", "depth": None}
    retained = load_block({"kind": "user", "parts": [part]})
    assert retained == UserBlock((OpaquePart(FrozenMap(part)),))
    assert dump_block(retained)["parts"] == [part]


ODD_PARTS: list[dict[str, Any]] = [
    {},
    {"type": None},
    {"type": "text"},
    {"type": "text", "text": "x"},
    {"type": "refusal", "refusal": "no", "why": "?"},
    {"type": "image", "source": {"type": "base64"}},
    {"type": "opaque", "content": {"type": "opaque"}},
    {"type": "input_text", "text": "x", "cache": True},
]


@for_each("content", ODD_PARTS)
def test_an_opaque_part_is_never_loaded_as_a_known_part(content: Any) -> None:
    """A provider's part with a missing type or the type of a known part is loaded as an opaque part."""
    block = UserBlock((OpaquePart(FrozenMap(content)),))
    assert load_block(dump_block(block)).content == block.content
    recorded = UserBlock((OpaquePart(FrozenMap(content), extra=FrozenMap(new=1)),))
    assert load_block(dump_block(recorded)).parts[0].extra == {"new": 1}  # pyright: ignore[reportAttributeAccessIssue]


def test_members_at_their_default_are_left_out() -> None:
    """The JSON form of a plain block contains its kind, id and content only."""
    text = {"type": "text", "text": "hi"}
    assert dump_block(user("hi", id="a")) == {"kind": "user", "id": "a", "parts": [text]}
    assert dump_block(system("s", id="a")) == {"kind": "system", "id": "a", "text": "s"}
    assert dump_block(reasoning(id="a")) == {"kind": "reasoning", "id": "a"}
    call = {"kind": "tool_call", "id": "a", "call_id": "c", "name": "f", "arguments": "{}"}
    assert dump_block(tool_call("f", "{}", call_id="c", id="a")) == call
    assert dump(Turn(id="t")) == {"format": "kedge.turn", "version": 2, "id": "t", "blocks": []}


def test_missing_members_have_their_default() -> None:
    """A missing member means the same as its explicit default, and a missing id is generated."""
    full = {"kind": "system", "text": "s", "role": "system", "metadata": {}, "origin": "user"}
    assert dump_block(load_block({**full, "id": "a"})) == dump_block(system("s", id="a"))
    assert load_block(full).id.startswith("blk_")
    turn = load({"format": "kedge.turn", "version": 2, "blocks": [], "data": {}})
    assert turn.id.startswith("turn_")


def test_dumped_values_are_copies() -> None:
    """Changing the value returned by ``dump`` does not change the Turn."""
    turn = Turn([user("a", metadata={"tags": ["x"]})], data={"list": [1]})
    form = dump(turn)
    form["data"]["list"].append(2)
    form["blocks"][0]["metadata"]["tags"].append("y")
    form["blocks"][0]["parts"].clear()
    assert turn.data == {"list": [1]}
    assert turn[0] == user("a")
    assert turn[0].metadata == {"tags": ["x"]}
    loaded = load(form)
    form["data"]["list"].append(3)
    assert loaded.data == {"list": [1, 2]}


LONE = "lone surrogate at character 0"
OLDER = "written by a development version of Kedge (form 1); this version reads form 2 only"
NEWER = "written by a newer version of Kedge (form 3, this one reads 2); upgrade Kedge"
INVALID_FORMS: list[tuple[Any, str, str]] = [
    (None, "$", "expected an object, got null"),
    ({}, "$.format", "expected 'kedge.turn'"),
    ({"version": True}, "$.version", "expected a positive integer"),
    ({"version": 3}, "$.version", NEWER),
    ({"version": 1}, "$.version", OLDER),
    ({"blocks": None}, "$.blocks", "expected an array, got null"),
    ({"id": 5}, "$.id", "expected a string, got a number"),
    ({"id": ""}, "$.id", "expected an id, got an empty string"),
    ({"data": []}, "$.data", "expected an object, got an array"),
    ({"data": {"a": {"b": [{1, 2}]}}}, "$.data.a.b[0]", "a value of type set is not JSON"),
    ({"x_new": 10**1000}, "$.x_new", "an integer of more than 2048 bits"),
    ({"blocks": [{}]}, "$.blocks[0].kind", "missing"),
    ({"blocks": [{"kind": "user"}]}, "$.blocks[0].parts", "missing"),
    ({"blocks": [{"kind": "dream", "id": 1}]}, "$.blocks[0].id", "expected a string, got a number"),
    ({"blocks": [{"kind": "dream", "a": "\ud800"}]}, "$.blocks[0].a", LONE),
]
ONLY = "an assistant block can have text and refusals only"
NOT_ONE = "needs exactly one of"
TEXT, IMAGE, FILE = {"type": "text"}, {"type": "image"}, {"type": "file"}
INVALID_BLOCKS: list[tuple[str, dict[Any, Any], str, str]] = [
    ("user", {"id": ""}, ".id", "expected an id, got an empty string"),
    (
        "user",
        {"metadata": {"a b": [b""]}},
        '.metadata["a b"][0]',
        "a value of type bytes is not JSON",
    ),
    ("user", {5: 5}, "", "the key 5 is not a string"),
    ("assistant", {"parts": [{**IMAGE, "url": "u"}]}, ".parts[0].type", ONLY),
    ("system", {"role": "user"}, ".role", "expected 'system' or 'developer'"),
    ("tool_call", {"call_id": ""}, ".call_id", "expected an id, got an empty string"),
    ("tool_call", {"arguments": {}}, ".arguments", "expected a string, got an object"),
    ("tool_call", {"custom": 1}, ".custom", "expected true or false, got a number"),
    ("reasoning", {"summary": "abc"}, ".summary", "expected an array, got a string"),
    ("reasoning", {"texts": ["a", None]}, ".texts[1]", "expected a string, got null"),
    ("opaque", {"item": {}}, "", "an opaque block's item needs a type"),
]
INVALID_PARTS: list[tuple[Any, str, str]] = [
    ([], "", "expected an object, got an array"),
    (TEXT, ".text", "missing"),
    ({**TEXT, "text": "\udc00"}, ".text", "lone surrogate at character 0"),
    ({**TEXT, "text": "a", "new": {1: 2}}, ".new", "the key 1 is not a string"),
    (IMAGE, "", f"an image {NOT_ONE} url, file_id; got none"),
    ({**FILE, "url": "u", "data": "d"}, "", f"a file {NOT_ONE} url, data, file_id; got url, data"),
]
INVALID_BLOCKS += [("user", {"parts": [part]}, f".parts[0]{p}", e) for part, p, e in INVALID_PARTS]
EMPTY_FORM = {"format": "kedge.turn", "version": 2, "blocks": []}


@for_each(("change", "path", "problem"), INVALID_FORMS)
def test_invalid_turn_error_has_a_path(change: Any, path: str, problem: str) -> None:
    """An invalid Turn raises an error with the path of the member and the problem."""
    complete = isinstance(change, dict) and change and "format" not in change
    with pytest.raises(InvalidJSON) as error:
        load({**EMPTY_FORM, **change} if complete else change)
    assert (error.value.path, error.value.problem) == (path, problem)


@for_each(("kind", "change", "path", "problem"), INVALID_BLOCKS)
def test_invalid_block_error_has_a_path(kind: str, change: Any, path: str, problem: str) -> None:
    """The path starts at the root of the Turn, or at the path passed by the caller."""
    plain = next(dump_block(block) for block in sample_blocks() if block.kind == kind)
    broken = {**plain, **change}
    with pytest.raises(InvalidJSON) as error:
        load({**EMPTY_FORM, "blocks": [dump_block(user("fine")), broken]})
    assert (error.value.path, error.value.problem) == (f"$.blocks[1]{path}", problem)
    with pytest.raises(InvalidJSON) as error:
        load_block(broken, "$.head")
    assert error.value.path == f"$.head{path}"


def test_duplicate_id_error_has_both_paths() -> None:
    """The error for a duplicate id has the path of the later block and names the earlier one."""
    form = dump(Turn([user("a", id="x"), assistant("b", id="y"), tool_result("c", "d", id="z")]))
    form["blocks"][2]["id"] = "x"
    with pytest.raises(InvalidJSON) as error:
        load(form)
    assert error.value.path == "$.blocks[2].id"
    assert error.value.problem == "the same id as $.blocks[0]"


JUNK = st.one_of(
    json_values(),
    st.sampled_from([float("nan"), float("inf"), "\ud800", 10**700, b"x", object(), {1: 2}, ()]),
)


def load_or_error(read: Callable[[Any], Turn], form: Any) -> Turn | InvalidJSON:
    try:
        return read(form)
    except InvalidJSON as error:
        return error


def format_path(path: Path) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else path_step(step) for step in path)


def mutate(form: Any, data: st.DataObject) -> Path:
    """Change one member anywhere in the JSON form, and return its path."""
    path, chosen = data.draw(st.sampled_from([each for each in containers(form) if each[1]]))
    keys = list(chosen) if isinstance(chosen, dict) else range(len(chosen))
    key = data.draw(st.sampled_from(keys))
    if data.draw(st.booleans()):
        chosen[key] = data.draw(JUNK)
    else:
        del chosen[key]
    return (*path, key)


@settings(max_examples=scale_examples(75))
@given(turns(max_size=2), st.data())
def test_mutated_form_loads_or_raises_with_a_path(turn: Turn, data: st.DataObject) -> None:
    """An invalid member raises an error whose path is the member, its parent or a conflicting member."""
    form = copy.deepcopy(dump(turn))
    changed = mutate(form, data)
    owner = format_path(changed[:-1])
    loaded = load_or_error(load, form)
    if isinstance(loaded, Turn):
        assert json_equal(dump(load(dump(loaded))), dump(loaded))
        assert json_equal(loaded.extra, {k: v for k, v in form.items() if k in loaded.extra})
    elif loaded.problem.startswith("the same id as"):
        assert loaded.path.startswith("$.blocks[")
    else:
        assert loaded.path.startswith(owner) or owner.startswith(loaded.path)


@settings(max_examples=scale_examples(75))
@given(turns(max_size=2), st.data())
def test_mutated_text_loads_or_raises_invalid_json(turn: Turn, data: st.DataObject) -> None:
    """Text with removed or inserted characters or bytes raises ``InvalidJSON`` or loads as a Turn."""
    text: Any = dumps(turn)
    if data.draw(st.booleans()):
        text = text.encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 4)))
    characters = list('"{}[],:\\0-\x00')
    replacements = ["", "\\u", "e9999", "NaN", "null", *characters]
    replacement: Any = data.draw(st.sampled_from(replacements) | st.text(max_size=2))
    if isinstance(text, bytes):
        encoded = replacement.encode(errors="surrogatepass")
        replacement = data.draw(st.binary(max_size=2) | st.just(encoded))
    loaded = load_or_error(loads, text[:start] + replacement + text[stop:])
    if isinstance(loaded, Turn):
        assert_identical(loads(dumps(loaded)), loaded)
    else:
        assert loaded.path.startswith("$")


LARGEST = (1 << 2048) - 1


def turn_json(data: str) -> str:
    return f'{{"format": "kedge.turn", "version": 2, "blocks": [], "data": {{"x": {data}}}}}'


REJECTED = [
    ("NaN", "$.data.x", "NaN is not a JSON number"),
    ("[1, Infinity]", "$.data.x[1]", "Infinity is not a JSON number"),
    ("1e999", "$.data.x", "the number is too large"),
    ("1e-999", "$.data.x", "the number is too small"),
    ('{"y": 0.0000001e-400}', "$.data.x.y", "the number is too small"),
    (str(LARGEST + 1), "$.data.x", "an integer of more than 2048 bits"),
    (r'"\ud800"', "$.data.x", "lone surrogate at character 0"),
    (r'{"\udfff": 1}', r'$.data.x["\udfff"]', "lone surrogate at character 0"),
    ('{"y": 1, "y": 1}', "$.data.x.y", "given twice"),
    ('{"a b": {"": 1, "c": 2, "": 3}}', '$.data.x["a b"][""]', "given twice"),
    ("[" * 101 + "]" * 101, "$.data.x" + "[0]" * 99, "nested more than 100 levels deep"),
]


HEAD = '{"format": "kedge.turn", "version": 2, "blocks":'
LOCATED_ERRORS = [
    *((turn_json(data), path, problem) for data, path, problem in REJECTED),
    ("NaN", "$", "NaN is not a JSON number"),
    ('{"format": "kedge.turn", "format": "kedge.turn"}', "$.format", "given twice"),
    (f"{HEAD} 1e999}}", "$.blocks", "the number is too large"),
    (f'{HEAD} [], "id": NaN}}', "$.id", "NaN is not"),
]
LOCATED_BLOCK_ERRORS = [
    ('{"kind": "user", "parts": [], "kind": "user"}', ".kind", "given twice"),
    ('{"kind": "user", "parts": [-Infinity]}', ".parts[0]", "-Infinity is not a JSON number"),
    ('{"kind": "dream", "a": [{"b": 1, "b": 2}]}', ".a[0].b", "given twice"),
]
LOCATED_ERRORS += [
    (f"{HEAD} [{block}]}}", f"$.blocks[0]{path}", problem)
    for block, path, problem in LOCATED_BLOCK_ERRORS
]


@for_each(("text", "path", "problem"), LOCATED_ERRORS)
def test_invalid_value_is_reported_with_its_path(text: str, path: str, problem: str) -> None:
    """A value that Python would change, invent or drop is reported as such, not as a wrong type."""
    with pytest.raises(InvalidJSON) as error:
        loads(text)
    assert error.value.path == path
    assert error.value.problem.startswith(problem)


PRESERVED: list[tuple[str, Any]] = [
    ("18446744073709551616", 1 << 64),
    (str(LARGEST), LARGEST),
    (str(-LARGEST), -LARGEST),
    ("-0.0", -0.0),
    ("0e-999", 0.0),
    ("5e-324", 5e-324),
    ("1.7976931348623157e308", 1.7976931348623157e308),
    (r'"\ud83d\ude00"', "\U0001f600"),
    (r'"\u0000"', "\x00"),
]


@for_each(("data", "value"), PRESERVED)
def test_valid_values_are_stored_exactly(data: str, value: Any) -> None:
    """Large integers, the limits of doubles and escaped text are unchanged after a round trip."""
    turn = loads(turn_json(data))
    assert repr(turn.data["x"]) == repr(value)
    assert repr(loads(dumps(turn)).data["x"]) == repr(value)


NOT_JSON: list[tuple[Any, str]] = [
    ("", "not JSON: Expecting value at character 0"),
    ("[1] x", "not JSON: Extra data at character 4"),
    ('"a\nb"', "not JSON: Invalid control character"),
    ("\ufeff{}", "not JSON"),
    ("{}".encode("utf-16"), "not UTF-8 at byte 0"),
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    (b'"\xed\xa0\x80"', "not UTF-8 at byte 1"),
    ("[" * 100_000, "nested too deeply"),
    (None, "expected JSON text, got NoneType"),
]


@for_each(("text", "problem"), NOT_JSON)
def test_text_that_is_not_json_is_rejected(text: Any, problem: str) -> None:
    """Invalid text, other encodings and excessive nesting are rejected with the path of the root."""
    with pytest.raises(InvalidJSON) as error:
        loads(text)
    assert error.value.path == "$"
    assert problem in error.value.problem


@given(json_values())
def test_valid_json_is_parsed_as_by_the_standard_library(value: Any) -> None:
    """Valid JSON is parsed to the same value as by Python's own parser."""
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        for form in (text, text.encode()):
            assert json.dumps(parse_json(form)) == json.dumps(value)


DIGIT_LIMIT_SCRIPT = """
from kedge.errors import InvalidJSON
from kedge.turns import dumps, loads
form = '{"format": "kedge.turn", "version": 2, "blocks": [], "data": {"x": %s}}'
largest = (1 << 2048) - 1
assert loads(dumps(loads(form % largest))).data["x"] == largest
for digits in (618, 641, 1000, 5000):
    try:
        loads(form % ("9" * digits))
    except InvalidJSON as error:
        assert error.path == "$.data.x", error.path
    else:
        raise AssertionError(digits)
"""


def test_integer_limit_is_independent_of_int_max_str_digits() -> None:
    """The maximum size of integers is the same in a Python with the lowest ``int_max_str_digits``."""
    command = [sys.executable, "-X", "int_max_str_digits=640", "-c", DIGIT_LIMIT_SCRIPT]
    subprocess.run(command, timeout=300, check=True)
