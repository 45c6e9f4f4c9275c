"""Tests of the harness with a module of two functions: what is measured, selected, run and reported."""

import shutil
from pathlib import Path

import pytest

import mutants
from mutation.measure import HarnessError, Measurement, measure_tests, sort_tests
from mutation.operators import Mutant, generate_mutants
from mutation.run import MutantRun, Result, run_mutant

SOURCE = """
def get_limit(count):
    while count > 3:
        count = 3
    return count


def get_name():
    return ["a", "b"][0]


def get_unused():
    return len([1])


def get_step():
    return len([1])


STEP = get_step()
"""
TESTS = """
import runpy

SAMPLE = runpy.run_path("src/kedge/planning/sample.py")

def test_limit():
    assert SAMPLE["get_limit"](4) == 3

def test_name():
    assert SAMPLE["get_name"]() in ("a", "b")
"""
MODULE = "planning/sample.py"
LIMIT, NAME = (f"tests/planning/test_sample.py::test_{name}" for name in ("limit", "name"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository with a module and its tests."""
    source = tmp_path / "src" / "kedge"
    tests = tmp_path / "tests"
    for folder in (source / "planning", tests / "planning"):
        folder.mkdir(parents=True)
    (source / MODULE).write_text(SOURCE)
    (tests / "planning" / "test_sample.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:schemathesis -p no:kedge\n")
    ignored = shutil.ignore_patterns("__pycache__", "test_*")
    shutil.copytree(Path(__file__).parent, tests / "mutation", ignore=ignored)
    return tmp_path


def find_mutant(address: str) -> Mutant:
    """Return the mutant of the module with this address."""
    (found,) = [each for each in generate_mutants(MODULE, SOURCE) if str(each) == address]
    return found


def test_tests_are_selected_by_the_lines_that_they_execute(tree: Path, tmp_path: Path) -> None:
    """The tests of a mutant execute its code, or its module if the code runs at import; they are measured once."""
    records = tmp_path / "records"
    measured = measure_tests(tree, records, ["tests"], ["tests/mutation"], workers=1)
    (tree / "tests" / "planning" / "test_sample.py").unlink()
    again = measure_tests(tree, records, ["tests"], ["tests/mutation"], workers=1)
    for measurement in (measured, again):
        assert select(measurement, f"{MODULE}::get_limit negate-condition #1") == [LIMIT]
        assert select(measurement, f"{MODULE}::get_name change-number #1") == [NAME]
        assert select(measurement, f"{MODULE}::get_unused return-none #1") == []
        assert sorted(select(measurement, f"{MODULE}::get_step return-none #1")) == [LIMIT, NAME]


def select(measurement: Measurement, address: str) -> list[str]:
    """Return the tests that are selected for a mutant."""
    return measurement.limit_tests(measurement.find_tests(find_mutant(address)))


def test_a_test_that_fails_without_a_mutant_is_an_error(tree: Path, tmp_path: Path) -> None:
    """The harness does not count mutants with tests that fail anyway."""
    (tree / "tests" / "planning" / "test_other.py").write_text("def test_it():\n    assert 0\n")
    with pytest.raises(HarnessError, match="test_other"):
        measure_tests(tree, tmp_path / "records", ["tests"], ["tests/mutation"], workers=0)


RUNS = [
    ("get_limit negate-condition #1", [LIMIT], 300.0, 300, "caught"),
    ("get_limit drop-statement #1", [LIMIT], 300.0, 1, "timed out"),
    ("get_limit drop-statement #1", [LIMIT], 0.1, 300, "timed out"),
    ("get_name change-number #1", [NAME], 300.0, 300, "survived"),
    ("get_unused return-none #1", [], 300.0, 300, "not executed"),
]
"""A mutant, its tests, the seconds and the seconds of CPU that they may take, and the result."""


@pytest.mark.parametrize(("address", "tests", "timeout", "cpu_timeout", "status"), RUNS)
def test_a_mutant_is_caught_by_a_test_that_fails(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    tests: list[str],
    timeout: float,
    cpu_timeout: int,
    status: str,
) -> None:
    """A mutant is caught by a failing test or by one that does not end; the source is restored."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take seconds to import
    mutant = find_mutant(f"{MODULE}::{address}")
    result = run_mutant(tree, MutantRun(mutant, tuple(tests), len(tests), timeout, cpu_timeout))
    failed = f"FAILED {LIMIT}" if status == "caught" else ""
    assert (result.status, result.failed.partition(" - ")[0]) == (status, failed)
    assert (tree / "src" / "kedge" / MODULE).read_text() == SOURCE


def test_specific_tests_run_first() -> None:
    """Tests in a file with the name of the module precede those of its folder, and files take turns."""
    names = ["law/test_a.py::a", "planning/test_b.py::b", "planning/test_b.py::c"]
    names += ["planning/test_d.py::d", "planning/test_plan_modes.py::e"]
    paths = [f"tests/{name}" for name in names]
    expected = [paths[4], paths[1], paths[3], paths[2], paths[0]]
    assert sort_tests("planning/plan.py", paths) == expected


def test_the_seed_selects_different_mutants() -> None:
    """A seed selects the same mutants every time, each of them once, in the order of the source."""
    listed = mutants.list_mutants(mutants.ROOT, "planning/tags.py::")
    drawn = mutants.draw_mutants(listed, 20, seed=1)
    assert drawn == mutants.draw_mutants(listed, 20, seed=1)
    assert drawn != mutants.draw_mutants(listed, 20, seed=2)
    assert drawn == sorted(set(drawn), key=listed.index)
    assert len(drawn) == 20
    assert mutants.list_test_folders(drawn) == ["tests/engines", "tests/law", "tests/planning"]


def test_survivors_are_printed_with_their_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary has the place and the difference of each survivor, and the number of each status."""
    listed = mutants.list_mutants(mutants.ROOT, "planning/tags.py::")
    drawn = mutants.draw_mutants(listed, 2, seed=1)
    statuses = ("survived", "caught")
    entries = [
        mutants.report_result(
            Result(mutant, status), mutants.plan_run(mutant, ["a"], 3, seconds=1.0)
        )
        for mutant, status in zip(drawn, statuses, strict=True)
    ]
    mutants.print_summary(entries)
    printed = capsys.readouterr().out
    shown = f"{entries[0]['place']}: survived {drawn[0]}, 1 of 3 tests that execute it\n"
    assert shown in printed
    assert str(drawn[1]) not in printed
    assert mutants.format_diff(drawn[0]) in printed
    assert "1 of 2 mutants were noticed" in printed
