"""Tests of the campaign's steps, their documentation and their failures."""

import json
from pathlib import Path

import pytest

import campaign

ROOT = Path(__file__).parent.parent


def test_every_step_names_files_that_exist() -> None:
    """A step of a renamed test would otherwise fail only after an hour."""
    test_paths = [
        part for step in campaign.STEPS for part in step.command if part.startswith("tests/")
    ]
    assert test_paths
    assert [path for path in test_paths if not (ROOT / path).exists()] == []


def test_a_failed_step_fails_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of a failed step is in the report, and the later steps run."""
    program = "import os, sys; print(os.environ['COUNT']); sys.exit({count} == 2)"
    steps = [campaign.Step(name, ("-c", program), n, "COUNT") for name, n in (("a", 20), ("b", 30))]
    monkeypatch.setattr(campaign, "STEPS", steps)
    report = tmp_path / "report.json"
    assert campaign.main(["--scale", "0.1", "--report", str(report)]) == 1
    results = json.loads(report.read_text())
    assert [(each["passed"], each["output"]) for each in results] == [(False, "2\n"), (True, "3\n")]
    assert "FAILED  a" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        campaign.main(["--only", "nothing"])
