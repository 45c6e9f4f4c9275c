"""Test that arguments of a wrong type are rejected by name, wherever a program passes them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import public_calls
from for_each import for_each
from kedge import Conversation
from kedge._internal.argument_types import check_fields, checked
from kedge._internal.arguments import describe_value
from kedge.errors import InvalidSetting, InvalidTurn, InvalidType, KedgeError
from kedge.store import open_store
from kedge.turns import Block, Turn, user

WRONG_VALUES: list[Any] = [5, "x", None, True, object(), [5], {5: 5}, (None,), 10**5000]
TURN = Turn([user("x")])


@checked
def accept(
    text: str = "",
    *rest: Block | str,
    count: int | None = None,
    share: float = 0.0,
    is_on: bool = False,
    tags: Iterable[str] = (),
    numbers: Sequence[int] = (),
    data: Mapping[str, Any] = {},
    compute: Callable[[int], int] | None = None,
    mode: Literal["a", "b"] = "a",
    path: str | os.PathLike[str] = "",
    noted: Annotated[int, "a note"] = 0,
    turn: Turn | None = None,
    anything: Any = None,
) -> str:
    """Return the text."""
    return text


@for_each(
    "arguments",
    [
        *(
            {"text": "x"},
            {"count": 5},
            {"count": None},
            {"share": 1},
            {"share": 1.5},
            {"is_on": True},
        ),
        *(
            {"tags": ["a"]},
            {"tags": ("a",)},
            {"tags": {"a"}},
            {"tags": iter([5])},
            {"numbers": [1]},
        ),
        *(
            {"data": {"a": 1}},
            {"compute": abs},
            {"compute": None},
            {"mode": "a"},
            {"mode": "other"},
        ),
        *({"path": "x"}, {"path": Path("x")}, {"noted": 5}, {"turn": TURN}, {"anything": object()}),
    ],
)
def test_right_types_are_accepted(arguments: dict[str, Any]) -> None:
    """A value of the annotated type is accepted; what a literal or an iterator contains is not checked."""
    assert accept(**arguments) == arguments.get("text", "")


@for_each(
    ("arguments", "message"),
    [
        ({"text": 5}, "text must be str, not int"),
        ({"text": None}, "text must be str, not NoneType"),
        ({"count": "5"}, "count must be int or None, not str"),
        ({"count": True}, "count must be int or None, not bool"),
        ({"share": False}, "share must be float, not bool"),
        ({"is_on": 1}, "is_on must be bool, not int"),
        ({"numbers": "12"}, "numbers must be a list of int, not str"),
        ({"numbers": [1, "2"]}, "numbers must be a list of int, not a list of int, str"),
        ({"numbers": {1: 2}}, "numbers must be a list of int, not a dict with keys of int"),
        ({"data": [1]}, "data must be a mapping, not a list of int"),
        ({"data": {1: 2}}, "data must be a mapping, not a dict with keys of int"),
        ({"compute": 5}, "compute must be a function or None, not int"),
        ({"mode": "a", "path": 5}, "path must be str or PathLike, not int"),
        ({"noted": "x"}, "noted must be int, not str"),
    ],
)
def test_wrong_types_are_named(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument, what it may be and what it is; it is an error of Python's kind as well."""
    with pytest.raises(InvalidType) as exc_info:
        accept(**arguments)
    assert str(exc_info.value) == message
    assert isinstance(exc_info.value, InvalidSetting)
    assert isinstance(exc_info.value, TypeError)


def test_value_in_place_of_a_turn_or_block() -> None:
    """A value in place of a Turn or a block raises the error of Turns."""
    wrong: Any = 5
    with pytest.raises(InvalidTurn, match="turn must be Turn or None, not int"):
        accept(turn=wrong)
    with pytest.raises(InvalidTurn, match="rest must be block or str, not int"):
        accept("x", "y", wrong)
    assert accept("x", "y", user("z")) == "x"


async def test_async_functions_are_checked() -> None:
    """An async function remains one, and raises the error when it is awaited."""

    @checked
    async def accept_later(text: str) -> str:
        return text

    wrong: Any = 5
    later = accept_later(wrong)
    with pytest.raises(InvalidType, match="text must be str"):
        await later
    assert await accept_later("x") == "x"


def test_fields_are_checked() -> None:
    """The fields of a dataclass, also inherited ones, are checked by name."""

    @dataclass
    class Base:
        name: str

        def __post_init__(self) -> None:
            check_fields(self)

    @dataclass
    class Derived(Base):
        count: int = 0

    wrong: Any = "5"
    with pytest.raises(InvalidType, match="count must be int, not str"):
        Derived("x", wrong)
    with pytest.raises(InvalidType, match="name must be str, not NoneType"):
        Derived(None)  # type: ignore[arg-type]
    assert Derived("x", 5).count == 5


async def check_calls(calls: Iterable[public_calls.Call], value: object) -> list[str]:
    """Return the arguments for which a wrong value is an error of Python, with the error."""
    problems: list[str] = []
    for call in calls:
        for name, make in call.replace_each(value):
            try:
                await public_calls.run(make())
            except KedgeError as error:
                problems += [] if str(error) else [f"{call.function.__qualname__}({name}): no text"]
            except Exception as error:  # noqa: BLE001 - whatever Python raises is what this test looks for
                where = f"{call.function.__qualname__}({name}={describe_value(value):.20})"
                problems.append(f"{where}: {error!r:.90}")
    return problems


@for_each("value", WRONG_VALUES)
async def test_wrong_arguments_raise_no_error_of_python(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No argument of a public function raises an error of Python, whatever is passed in its place."""
    monkeypatch.chdir(tmp_path)  # a text may be the name of a new file
    assert await check_calls(public_calls.list_pure_calls(tmp_path), value) == []
    async with open_store("sqlite://:memory:") as store:
        assert await check_calls(await public_calls.list_store_calls(store), value) == []


@for_each("name", ["title", "tags", "data", "lease", "ttl", "price", "retention", "id"])
def test_settings_of_a_conversation_are_checked(name: str) -> None:
    """A setting of a conversation with a wrong type raises an error before anything is opened."""
    wrong: dict[str, Any] = {name: object()}
    with pytest.raises((InvalidSetting, InvalidTurn), match=name):
        Conversation("practice", store="sqlite://:memory:", **wrong)
