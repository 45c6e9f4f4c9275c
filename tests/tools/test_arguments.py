"""Tests of the problems reported for the arguments of a tool call, which a model uses to correct them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field

from for_each import for_each
from kedge.errors import InvalidArguments
from kedge.tools.schema import MAX_PROBLEMS, build_function_schema
from kedge.tools.signature import parse_signature
from kedge.turns import tool_call
from strategies import json_values


@dataclass
class Point:
    x: int
    y: int = 0


class Leg(BaseModel, extra="forbid"):
    to: str
    via: list[Point] = []


def _even(value: int) -> int:
    if value % 2:
        raise ValueError("it must be even")
    return value


def trip(
    start: str,
    days: Annotated[int, Field(ge=1)] = 1,
    legs: list[Leg] | None = None,
    mode: Literal["car", "train"] = "car",
    where: int | list[int] | Point = 0,
    seats: Annotated[int, AfterValidator(_even)] = 2,
    prices: dict[str, int] | None = None,
) -> None: ...


SCHEMA = build_function_schema("trip", parse_signature(trip))


def argument_problems(arguments: str | dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InvalidArguments) as error:
        SCHEMA.parse_arguments(tool_call("trip", arguments))
    return error.value.problems


@for_each(
    ("arguments", "problem"),
    [
        ({}, 'start: it is required and missing; expected {"type": "string"}'),
        ({"days": 0}, 'days: it should be greater than or equal to 1; expected {"minimum": 1, '),
        ({"days": "many"}, "days: it should be a valid integer, unable to parse string as an int"),
        ({"zzz": 1}, "zzz: unknown argument; the arguments are: start, days, legs, mode, where"),
        ({"mode": "plane"}, "mode: it should be 'car' or 'train'; expected {"),
        ({"legs": [{"to": "Rome"}, {}]}, "legs[1].to: it is required and missing; expected"),
        ({"legs": [{"to": "", "two": 1}]}, "legs[0].two: unknown argument; did you mean to?"),
        ({"where": {}}, "where.x: it is required and missing"),
        ({"where": "?"}, "; or: it should be a valid array; or: it should be an object"),
        ({"seats": 3}, "seats: it must be even; expected"),
        ({"prices": {"a": "?"}}, "prices.a: it should be a valid integer, unable to parse string"),
        (" ", "start: it is required"),
        ("[]", "the arguments are an array; write one JSON object"),
        ("{", "the arguments are not valid JSON (EOF while parsing an object at line 1"),
        ("[" * 1000, "the arguments are not valid JSON (recursion limit exceeded"),
    ],
)
def test_each_problem_names_the_argument_and_what_is_expected(
    arguments: str | dict[str, Any], problem: str
) -> None:
    """A problem names the argument, what is wrong with it and which schema it should match."""
    assert problem in "\n".join(argument_problems(arguments))


def test_all_problems_are_reported_together_up_to_a_limit() -> None:
    """The alternatives of a union are one problem; the list ends with the number of the remaining ones."""
    received = argument_problems({"days": 0, "mode": "plane", "where": "?", "dayz": 1})
    names = ["start", "days", "mode", "where", "dayz"]
    assert [line.partition(":")[0] for line in received] == names
    received = argument_problems({f"x{i}": 1 for i in range(1000)})
    assert len(received) == MAX_PROBLEMS + 1
    assert received[-1] == f"and {1001 - MAX_PROBLEMS} more"


def test_values_are_not_quoted() -> None:
    """Neither the problems nor the error message quote the values of the arguments."""
    arguments = {"days": "hush", "mode": "hush", "legs": "hush", "where": "hush"}
    with pytest.raises(InvalidArguments) as error:
        SCHEMA.parse_arguments(tool_call("trip", arguments))
    assert "hush" not in "\n".join(error.value.problems)
    assert str(error.value) == "the arguments of a call of trip have 5 problem(s)"


fields = st.sampled_from(["start", "days", "legs", "mode", "where", "seats", "prices", "x"])


@given(st.dictionaries(fields, json_values()) | st.text(max_size=20))
def test_any_arguments_are_parsed_or_rejected(arguments: str | dict[str, Any]) -> None:
    """Random arguments are either parsed or rejected with ``InvalidArguments``."""
    received: tuple[str, ...] = ("it fits",)
    try:
        SCHEMA.parse_arguments(tool_call("trip", arguments))
    except InvalidArguments as error:
        received = error.problems
    assert received
    assert "function-after" not in "".join(received)
