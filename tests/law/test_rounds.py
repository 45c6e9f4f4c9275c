"""Tests of the rounds and shards of the campaign: they find no problem, and would find one."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from for_each import for_each
from kedge.engines import request_engine
from kedge.events import run as run_events
from kedge.planning import SentRequest
from law import rounds, shards
from law.fuzz import KINDS
from law.rounds import PROBLEMS, ROUNDS, run_round

IN_MEMORY, SOCKETS = 10, 0
"""Numbers of rounds in memory and over sockets."""


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run rounds of a third of their length."""
    for name in ("ACTIONS", "MESSAGES", "OBJECT_ACTIONS", "STORED_ACTIONS", "PAGE_ACTIONS"):
        monkeypatch.setattr(rounds, name, getattr(rounds, name) // 3)


def list_problems(counts: Counter[str]) -> dict[str, int]:
    """Return the problems that were found."""
    return {name: counts[name] for name in PROBLEMS if counts[name]}


@for_each("door", ROUNDS)
def test_a_round_in_memory_finds_no_problem(door: str) -> None:
    """The requests of each door have the context of their Turn, and everything that is said about them is true."""
    result = run_round(IN_MEMORY, door)
    assert not list_problems(result.counts), result.problem
    assert result.counts["requests"] > 5
    assert result.counts["compared"] > 3 or "views" in door


@pytest.mark.parametrize("door", ["engine", "chain", "proxy"])
def test_a_round_over_sockets_finds_no_problem(door: str) -> None:
    """The same rounds run over sockets, programs also with the clients of the SDK."""
    result = run_round(SOCKETS, door)
    assert not list_problems(result.counts), result.problem
    assert result.counts["transport sockets http"] + result.counts["transport sockets websocket"]


@pytest.mark.parametrize("door", ["engine", "Chat", "Conversation", "page"])
def test_a_request_without_its_first_item_is_found(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round counts requests whose context is not that of the Turn."""
    encode = request_engine.encode_body

    def drop_first(body: dict[str, Any]) -> bytes:
        items = body.get("input", ())
        return encode({**body, "input": items[1:]} if len(items) > 1 else body)

    monkeypatch.setattr(request_engine, "encode_body", drop_first)
    assert run_round(IN_MEMORY, door).counts["incoherent"] > 0


@pytest.mark.parametrize("door", ["engine", "Chat", "Conversation, all views", "page"])
def test_a_false_size_is_found(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round counts what is said about a request and is not so."""

    def lie(size: int, full: int, request: SentRequest | None) -> run_events.RequestSent:
        return run_events.RequestSent(size + 1, full + 1, request)

    false_events = SimpleNamespace(**{**vars(run_events), "RequestSent": lie})
    monkeypatch.setattr("kedge.engines.request_engine.run_events", false_events)
    assert run_round(IN_MEMORY, door).counts["false explanations"] > 0


def test_finished_shards_add_up() -> None:
    """Every kind of requests adds up to all of them, no shard has a problem, and none is listed twice."""
    finished = shards.read_shards(shards.FILE)
    for shard in finished:
        counts = shard["counts"]
        for kind in KINDS:
            parts = [counts[name] for name in counts if name.startswith(f"{kind} ")]
            assert sum(parts) == counts["requests"], (shard["shard"], kind)
        assert not list_problems(Counter(counts))
    assert len({shard["shard"] for shard in finished}) == len(finished)


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
