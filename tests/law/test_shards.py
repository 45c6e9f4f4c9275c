"""Tests of the shards of the campaign: finished ones are recorded and skipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from law import shards


@pytest.fixture
def run_numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace shards by ones of 100 requests, of which the second has a problem, and list those that run."""
    numbers: list[int] = []

    def run_shard(_: object, number: int, seeds: int) -> dict[str, Any]:
        numbers.append(number)
        counts = {"requests": 100, "lost": int(number == 1)}
        return {
            "shard": number,
            "commit": "a",
            "date": "2026-01-01",
            "cpu_seconds": 2.0,
            "counts": counts,
        }

    monkeypatch.setattr(shards, "run_shard", run_shard)
    return numbers


def test_finished_shards_are_skipped(
    run_numbers: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run continues after the recorded shards, and a shard with a problem is reported, repeated and not recorded."""
    file = tmp_path / "shards.jsonl"
    assert shards.main(["100", "--file", str(file), "--workers", "1"]) == 0
    assert shards.main(["250", "--file", str(file), "--workers", "1"]) == 1
    assert run_numbers == [0, 1, 2, 3]
    assert "shard 1 has a problem" in capsys.readouterr().out
    assert [json.loads(line)["shard"] for line in file.read_text().splitlines()] == [0, 2, 3]
    assert shards.main(["350", "--file", str(file), "--workers", "1"]) == 1
    assert run_numbers[4:] == [1, 4]
    assert shards.main(["350", "--file", str(file), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "4 shards, 2026-01-01 to 2026-01-01, 1 commits, 8 s of CPU" in printed
    assert "requests                                 400" in printed
