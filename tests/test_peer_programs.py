"""Tests of the eight programs of ``make bench-peers``, those with Kedge run."""

import sys
from pathlib import Path

import pytest
from benchmarks.peers.programs import (
    LIBRARIES,
    PAGE,
    TITLES,
    check_program,
    count_lines,
    format_table,
)


@pytest.mark.parametrize("name", TITLES)
def test_program_prints_what_is_expected(name: str) -> None:
    """Each program with Kedge prints what ``make bench-peers`` expects of every library."""
    check_program(Path(sys.executable), "kedge", name)


def test_another_output_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails if a program prints something else."""
    monkeypatch.setattr("benchmarks.peers.programs.run_program", lambda *_: "Your name is Eve.")
    with pytest.raises(AssertionError, match=r"printed 'Your name is Eve\.'"):
        check_program(Path(sys.executable), "kedge", "remember")


def test_programs_with_kedge_are_the_shortest() -> None:
    """All libraries have the eight programs, and those with Kedge have the fewest lines in sum."""
    counts = {library: count_lines(library) for library in LIBRARIES}
    assert all(each.keys() == TITLES.keys() for each in counts.values())
    sums = {library: sum(each.values()) for library, each in counts.items()}
    assert min(sums, key=sums.__getitem__) == "kedge"
    assert list(sums.values()).count(sums["kedge"]) == 1


def test_page_has_the_counted_lines() -> None:
    """The table of the documentation has the lines of the programs as they are."""
    assert format_table() in PAGE.read_text(encoding="utf-8")
