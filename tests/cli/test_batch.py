"""Tests of ``kedge batch``: input file, results file, summary and progress."""

import json
import os
import pty
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forked import ForkedProcess
from kedge.cli import group
from kedge.testing import serve
from server.gated_model import GatedModel


@pytest.fixture(autouse=True)
def prompts(folder: Path) -> None:
    """Write the file of prompts."""
    lines: list[dict[str, Any]] = [
        {"id": "sum", "prompt": "What is 2 + 3?"},
        {"id": "ship", "prompts": ["My ship is the Argo.", "What is my ship?"]},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))


def run_batch(*options: str) -> Result:
    return CliRunner().invoke(group, ["batch", "prompts.jsonl", "--out", "out.jsonl", *options])


def test_batch_prints_a_summary(folder: Path) -> None:
    """The summary is text or a JSON object, without a progress bar; a second run skips all lines."""
    done = run_batch("--concurrency", "2", "--requests-per-minute", "100")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("2 of 2 completed, 0 failed\n")
    assert done.stderr == ""
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert {each["id"]: each["answers"][-1] for each in results} == {
        "sum": "2 + 3 = 5.",
        "ship": "Your ship is the Argo.",
    }
    repeated = json.loads(run_batch("--json").stdout)
    assert (repeated["skipped"], repeated["completed"], repeated["input_tokens"]) == (2, 0, 0)
    assert "2 finished before" in run_batch().stdout


def test_failed_line_sets_exit_code(folder: Path) -> None:
    """A failed line sets exit code 1 and is tried again by the next run; an invalid one is named by its number."""
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('\n{"id": "bad", "prompt": "x", "model": "nobody:x"}')
    done = run_batch()
    assert done.exit_code == 1
    assert "2 of 3 completed, 1 failed\n  1 CannotConnect: no provider named" in done.stdout
    repeated = json.loads(run_batch("--json").stdout)
    assert (repeated["skipped"], repeated["failed"]) == (2, 1)
    (folder / "prompts.jsonl").write_text("{}\n")
    done = run_batch()
    assert done.exit_code == 1
    assert "line 1 of prompts.jsonl needs either a prompt or prompts" in done.stderr


def start_on_terminal(*options: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a batch whose standard error is a terminal; return the process and the other end."""
    controller, terminal = pty.openpty()
    command = ["-m", "kedge", "batch", "prompts.jsonl", "--out", "out.jsonl"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = ForkedProcess(
        [*command, *options], stdout=subprocess.PIPE, stderr=terminal, env=environ
    )
    os.close(terminal)
    return process, controller


def read_terminal(controller: int, pattern: bytes | None = None) -> bytes:
    """Read the output up to a pattern or to its end; an unread terminal would block the process."""
    output = b""
    with suppress(OSError):  # the other end is closed
        while pattern is None or not re.search(pattern, output):
            output += os.read(controller, 4096)
    if pattern is None:
        os.close(controller)
    return output


def test_interrupted_batch_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line says how to continue, and the same command resumes the batch."""
    prompts = ["Hello", *(f"wait {number}" for number in range(9))]
    lines = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = GatedModel()
    with serve(model=model) as server:
        monkeypatch.setenv("KEDGE_MODEL", f"responses:{server.base_url}#practice")
        process, controller = start_on_terminal("--concurrency", "2")
        read_terminal(controller, rb"1/10")
        process.send_signal(signal.SIGINT)
        output = read_terminal(controller).decode()
        process.communicate(timeout=300)
        assert process.returncode == 130
        last = output.splitlines()[-1]
        assert last.endswith("Interrupted. Run the same command again to continue.")
        model.open_gate()
        assert json.loads(run_batch("--json").stdout)["failed"] == 0
        output_lines = (folder / "out.jsonl").read_text().splitlines()
        assert sorted(json.loads(each)["id"] for each in output_lines) == sorted(
            map(str, range(10))
        )
        assert len(server.requests) <= 10 + 2
