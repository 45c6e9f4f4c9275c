"""Tests of ``kedge stats``: JSON for scripts, and charts on a terminal."""

from pathlib import Path

import pytest

from cli.sample_store import run_command, run_json
from kedge.conversation import Conversation
from kedge.testing import TestServer

MODEL = "practice-with-a-name-that-is-longer-than-a-column-of-a-narrow-table[/1]:x:"


@pytest.fixture
def filled(folder: Path, kedge_server: TestServer) -> None:
    """Create a store with a conversation whose responses the server once lost."""
    engine = f"responses:{kedge_server.base_url}#{MODEL}"
    with Conversation(engine, store=folder / "store.db").sync as conversation:
        for text in ("One", "Two", "Three"):
            conversation.send(text)
        kedge_server.forget()
        conversation.send("Four")


def test_json_has_all_statistics(filled: None) -> None:
    """JSON has totals and numbers over time, text has charts; an empty name or invalid time is an error."""
    report = run_json("stats", "--buckets", "4")
    assert report["requests"]["total"] == 5
    assert report["requests"]["healed"] == [{"name": "gone", "count": 1}]
    names = ("succeeded", "failed", "resent", "refused", "chained", "full")
    assert [report["requests"][name] for name in names] == [4, 0, 1, 1, 2, 2]
    assert report["chains"]["lengths"] == [[1, 1], [3, 1]]
    assert sum(each["requests"] for each in report["over_time"]) == 5
    assert len(report["over_time"]) == 4
    output = run_command("stats").stdout
    for expected in (
        "5 in 1 conversation ",
        "answered      100 %",
        "chained       2 (50 %), 2 in full",
        "failed        0; 1 sent again",
        "refused       1; 0 answered without context",
        "longest 3",
        "0 by id, 0 by fallback, 0 unmatched",
        "Healed by reason",
        "gone",
        f" {MODEL} ",
        "█",
    ):
        assert expected in output
    assert "there is no conversation ''" in run_command("stats", "--conversation", "").stderr
    done = run_command("stats", "--since", "tomorrow")
    assert done.exit_code == 2
    assert "write 2026-11-15" in done.stderr


def test_tree_marks_a_request_that_was_sent_again(filled: None) -> None:
    """The refused request is no failure in the tree and in the list, and its error is in the JSON."""
    (conversation,) = run_json("conversations")
    assert (conversation["failed"], conversation["status"]) == (0, "active")
    tree = run_command("tree", conversation["id"]).stdout
    assert "[resent: refused]" in tree
    assert "failed" not in tree
    nodes = run_json("tree", conversation["id"])["nodes"]
    (refused,) = [each["response"] for each in nodes if "resent" in each["marks"]]
    assert refused["error_code"] == "previous_response_not_found"
    assert "not found" in refused["error"]


def test_statistics_are_filtered(filled: None) -> None:
    """Statistics are filtered by time, model and provider."""
    for total, options in (
        (5, ["--since", "1h"]),
        (0, ["--until", "1h"]),
        (0, ["--since", "2020-01-01", "--until", "2020-01-02T12:00"]),
        (5, ["--model", MODEL]),
        (0, ["--provider", "nobody"]),
    ):
        assert run_json("stats", *options)["requests"]["total"] == total
        assert ("No requests in this range" in run_command("stats", *options).stdout) != bool(total)
