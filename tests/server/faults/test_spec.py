"""The syntax of fault specifications and its error messages."""

from pathlib import Path

import pytest

from for_each import for_each
from kedge.errors import InvalidFault
from kedge.server.faults import KINDS, Fault, Faults, parse

PAGE = Path(__file__).parents[3] / "docs" / "practice-model.md"


@for_each(
    ("spec", "fault"),
    [
        ("status=429,retry_after=1,times=2", Fault("status", 429, {"retry_after": 1.0}, times=2)),
        ("status=500", Fault("status", 500, {"retry_after": None})),
        ("forget_all", Fault("forget_all")),
        (" forget_silently , echo=no ", Fault("forget_silently", None, {"echo": "no"})),
        ("slow_first_byte=0.25", Fault("slow_first_byte", 0.25)),
        ("not_found=vllm,times=1", Fault("not_found", "vllm", times=1)),
        ("reorder_events,only=a", Fault("reorder_events", None, {"only": "a"})),
    ],
)
def test_parse_fault(spec: str, fault: Fault) -> None:
    """A specification is parsed into name, value, options and times."""
    assert parse(spec) == fault


@for_each(
    ("spec", "message"),
    [
        ("", "unknown fault ''; choose one of cut_after_events, cut_in_event, "),
        ("explode", "unknown fault 'explode'"),
        ("cut_after_events", "cut_after_events needs a value: cut_after_events=N"),
        ("cut_after_events=", "cut_after_events needs a value: cut_after_events=N"),
        ("cut_after_events=-1", "must be an integer, 0 or more, not '-1'"),
        ("status=200", "status must be an HTTP status from 400 to 599, not '200'"),
        ("status=teapot", "status must be an HTTP status from 400 to 599"),
        ("slow_first_byte=nan", "a number of seconds up to 3600, not 'nan'"),
        ("forget_all=yes", "forget_all takes no value"),
        ("forget_silently,echo=maybe", "echo must be one of yes, no, late, missing, not 'maybe'"),
        ("forget_silently,loudly=yes", "has no option 'loudly', only echo, times"),
        ("not_found=bing", "not_found must be one of openai, vllm, ogx, smg, xai, code"),
        ("remember=2,times=0", "times must be an integer, 1 or more, not '0'"),
    ],
)
def test_an_invalid_fault_lists_what_is_valid(spec: str, message: str) -> None:
    """The error for an invalid specification says what is expected instead."""
    with pytest.raises(InvalidFault) as exc_info:
        parse(spec)
    assert message in str(exc_info.value)


def test_documentation_lists_exactly_the_faults() -> None:
    """The table of the documentation has the same names, values, options and descriptions as the code."""
    documented = {
        line
        for line in PAGE.read_text().split("\n## Faults\n")[1].splitlines()
        if line.startswith("| `")
    }
    expected: set[str] = set()
    for name, kind in KINDS.items():
        value = "" if kind.value is None else f"={kind.value.placeholder}"
        options = "".join(
            f"[,{name}={argument.placeholder}]" for name, argument in kind.options.items()
        )
        pattern = f"{name}{value}{options}".replace("|", "/")  # a bar would end the cell
        expected.add(f"| `{pattern}` | {kind.description} |")
    assert documented == expected


def test_faults_are_armed_replaced_consumed_and_cleared() -> None:
    """A name has at most one armed fault, and ``times`` counts down until it is removed."""
    faults = Faults(["status=500", "remember=1"])
    assert set(faults.armed) == {"status", "remember"}
    fault = faults.set("status=429", times=2)
    assert faults.armed["status"].value == 429
    faults.consume(fault)
    assert faults.armed["status"].times == 1
    faults.consume(fault)
    faults.consume(fault)
    assert set(faults.armed) == {"remember"}
    faults.consume(faults.armed["remember"])
    faults.clear("status")
    assert set(faults.armed) == {"remember"}
    faults.clear()
    assert not faults.armed
