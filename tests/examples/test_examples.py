"""Tests that run the examples and check their output."""

import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from forked import run_forked
from kedge._internal.event_loops import run_sync
from kedge.testing import TestServer, serve

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestServer]:
    """Yield a server that is the model of the examples, for all processes of a test."""
    with serve() as running:
        monkeypatch.setenv("KEDGE_MODEL", f"responses:{running.base_url}#practice")
        yield running


def test_hello_with_state_over_two_processes(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process knows the first message, and sends only new blocks."""
    file = tmp_path / "hello.state"
    run_example("hello_with_state.py", str(file), "My name is Ada.", monkeypatch=monkeypatch)
    script = str(EXAMPLES / "hello_with_state.py")
    done = run_forked(script, str(file), "What is my name?", check=True)
    assert done.stdout.startswith("Your name is Ada.\nChained on resp_")
    assert done.stderr == ""
    first, last = (each.body for each in server.requests if each.method == "POST")
    assert len(first["input"]) == 2  # the event and the message
    assert len(last["input"]) == 1
    assert last["previous_response_id"] == server.requests[0].response_id
    assert b"Be brief" not in file.read_bytes()


def test_memory_continues_in_the_next_process(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process continues the conversation of the first, and sends only new blocks."""
    monkeypatch.setenv("KEDGE_STATE", str(tmp_path / "memory.state"))
    run_example("memory.py", "My name is Ada.", monkeypatch=monkeypatch)
    done = run_forked(str(EXAMPLES / "memory.py"), "What is my name?", check=True)
    assert (done.stdout, done.stderr) == ("Your name is Ada.\n", "")
    assert len(server.requests[-1].body["input"]) == 1


def test_streaming_terminal_prints_each_answer(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages are read from standard input until it ends."""
    monkeypatch.setattr("sys.stdin", io.StringIO("My name is Ada.\nWhat is my name?\n"))
    runpy.run_path(str(EXAMPLES / "streaming_terminal.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.endswith("> Your name is Ada.\n> ")
    assert server.requests[-1].body["stream"] is True


def test_streaming_fastapi_streams_chained_answers(server: TestServer) -> None:
    """Each user has a separate conversation, and only new blocks are sent."""
    app = runpy.run_path(str(EXAMPLES / "streaming_fastapi.py"))["app"]
    with TestClient(app) as client:
        client.post("/chat/ada", params={"text": "My name is Ada."})
        with client.stream("POST", "/chat/ada", params={"text": "What is my name?"}) as answer:
            chunks = list(answer.iter_text())
        other = client.post("/chat/bob", params={"text": "What is my name?"}).text
    assert "".join(chunks) == "Your name is Ada."
    assert "Ada" not in other
    assert server.requests[1].body["previous_response_id"] == server.requests[0].response_id
    assert all(request.body["stream"] for request in server.requests)


def test_state_stays_bounded_over_200_turns() -> None:
    """The size of the state is bounded, cuts are rare, and each one causes one full request."""
    example = runpy.run_path(str(EXAMPLES / "state_compaction.py"))
    sizes, cuts, full = run_sync(example["run_chat"](200))
    assert len(sizes) == 200
    assert max(sizes[100:]) <= max(sizes[:100]) * 1.05 < 21_000
    assert 5 <= cuts <= 20
    assert full == cuts + 1


PRINTED = {
    "custom_trigger.py": r"(?s).*compacted by SubjectChanged\+NewestSubject: -4"
    r".*1\. New subject: my dog is called Rex\.\n",
    "summarizer.py": r"(?s).*compacted by SummarizingCompactor.*Yes, in message 1.*Argo.*",
    "refine_puzzle.py": r"(?s).*score\D+0\.29\n.*score\D+0\.65\n.*score\D+1\.0\n.*solved\n(?<!not solved\n)",
    "debate.py": r"(?s)tea:\n  1\. Tea wakes .*coffee:\n.*  2\. Coffee wakes faster.*\ntea won after 2 rounds: .*",
    "pipeline.py": r"(?s)trip: Trip\(city='Lisbon', days=3, mode='ship'\)\n.*"
    r"note: '72 hours in Lisbon, by ship'\n.*I travel to Lisbon.*",
}
"""Example -> a pattern of all that it prints with its own scripted model."""


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_its_result(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Examples with a scripted model print their compactions, rounds, sides and typed results."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTED[name], printed), printed


def test_typed_output_prints_model_fields(
    server: TestServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields are printed even if the first answer is invalid."""
    text = "First invalid: I travel to Lisbon for 3 days by ship."
    run_example("typed_output.py", text, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "3 days in Lisbon, by ship\n"
    assert len(server.requests) == 2


def run_example(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in this process."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_tool_agent_answers_with_tool_result(
    server: TestServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool result is sent chained on the response that called the tool."""
    run_example("tool_agent.py", "What is the weather in Lisbon?", monkeypatch=monkeypatch)
    assert "sunny in Lisbon" in capsys.readouterr().out
    assert server.requests[1].body["previous_response_id"] == server.requests[0].response_id


def test_provider_swap_continues_the_conversation(
    server: TestServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation of the Responses API continues with Chat Completions and all messages."""
    models = [f"{api}:{server.base_url}#practice" for api in ("responses", "chat")]
    run_example("provider_swap.py", *models, monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "Your name is Ada.\n"
    assert [request.path for request in server.requests] == [
        "/v1/responses",
        "/v1/chat/completions",
    ]
