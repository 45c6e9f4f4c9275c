"""Tests of the list of mutants: the runner tells caught ones from survivors."""

from pathlib import Path

import pytest

from mutants import Mutant, run_mutant


def test_a_survivor_is_told_from_a_caught_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant is caught by a failing test, and survives without one; the source is restored."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take seconds to import
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "limits.py"
    source.write_text("LIMIT = 3\nSPARE = 4\n")
    (tmp_path / "test_limits.py").write_text(
        "import limits\n\ndef test_limit():\n    assert limits.LIMIT == 3\n"
    )
    caught = Mutant("src/limits.py", "LIMIT = 3", "LIMIT = 5", ("test_limits.py",))
    survivor = Mutant("src/limits.py", "SPARE = 4", "SPARE = 5", ("test_limits.py",))
    assert run_mutant(tmp_path, caught) == "FAILED test_limits.py::test_limit"
    assert run_mutant(tmp_path, survivor) == ""
    assert source.read_text() == "LIMIT = 3\nSPARE = 4\n"
