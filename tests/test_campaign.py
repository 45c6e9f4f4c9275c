"""Tests of the campaign's steps, their documentation and their failures."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import campaign
from law.shards import FILE, read_shards, sum_shards

ROOT = Path(__file__).parent.parent


def test_every_step_names_files_that_exist() -> None:
    """A step of a renamed test would otherwise fail only after an hour."""
    test_paths = [
        part for step in campaign.STEPS for part in step.command if part.startswith("tests/")
    ]
    assert test_paths
    assert [path for path in test_paths if not (ROOT / path).exists()] == []


def test_every_step_is_documented() -> None:
    """CONTRIBUTING.md lists the steps with their counts."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for step in campaign.STEPS:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {step.name} |")]
        assert step.count == 1 or f"{step.count:,}" in row, row


def test_the_readme_states_a_sum_of_finished_shards() -> None:
    """Its figures are the sum of the file's first shards; those that finished after the last edit may be missing."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if "`make campaign`" in line]
    starts = accumulate(([shard] for shard in read_shards(FILE)), list.__add__)
    assert [start for start in starts if all(figure in row for figure in list_figures(start))]


def list_figures(shards: list[dict[str, Any]]) -> list[str]:
    """Return the figures of shards as the README states them."""
    counts = sum_shards(shards)
    minutes = sum(shard["cpu_seconds"] for shard in shards) / 60
    return [
        f"{counts['requests']:,} requests until {shards[-1]['date']}, {minutes:.0f} minutes of CPU",
        *(f"{counts[name]} {name}" for name in ("incoherent", "false explanations", "lost")),
        f"{counts['sent bytes'] / counts['full bytes']:.2f} of the bytes of full sends",
        f"{counts['accepted']:,} answers lacked context",
    ]


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
