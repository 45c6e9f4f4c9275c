"""Tests of ``--mcp`` and ``--approve`` of ``kedge chat``, ``kedge batch`` and ``kedge run``."""

import asyncio
import io
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.sample_store import run_command
from kedge.cli.chat_tools import ask_approval
from kedge.testing import TestServer
from kedge.tools import Allow, Deny
from kedge.turns import tool_call
from mcp_tools.conftest import RAW_SERVER, read_pids

ECHO = 'Call echo with {"text": "hi"}'
STEPS = """
[[steps]]
name = "a"
prompt = 'Call echo with {{"text": "hi"}}'
"""
ECHOED = '{"text": "hi"}'


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kedge_server: TestServer, pid_file: Path
) -> Path:
    """Return a folder with a store and a configured model; servers write their process ids to a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEDGE_CONFIG", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setenv("KEDGE_MODEL", f"responses:{kedge_server.base_url}#practice")
    return tmp_path


@pytest.fixture
def server(pid_file: Path) -> str:
    """Return the command line of a server; ``env`` sets the variable that it needs."""
    return shlex.join(["env", f"PID_FILE={pid_file}", *RAW_SERVER, "plain"])


def test_chat_uses_mcp_tools(folder: Path, server: str, pid_file: Path) -> None:
    """The option can be repeated, and duplicate tool names get a prefix."""
    done = run_command("chat", "--mcp", server, stdin=ECHO)
    assert done.exit_code == 0, done.output
    assert ECHOED in done.output
    second = ECHO.replace("echo", "raw_server_echo_2")
    twice = run_command("chat", "--mcp", server, "--mcp", server, stdin=second)
    assert f"raw_server_echo_2 says: {ECHOED}" in twice.output
    assert len(read_pids(pid_file)) == 3


def test_server_that_cannot_be_started_is_reported(folder: Path) -> None:
    """A command that cannot be started is an error without a traceback."""
    done = run_command("chat", "--mcp", "no-such-command", stdin="hi")
    assert done.exit_code == 1
    assert "the MCP server no-such-command is not available" in done.output
    assert "Traceback" not in done.output


def test_batch_uses_mcp_tools(folder: Path, server: str) -> None:
    """MCP tools work with the asyncio runner only, because workers do not start servers."""
    (folder / "prompts.jsonl").write_text(json.dumps({"id": "a", "prompt": ECHO}))
    batch = ("batch", "prompts.jsonl", "--out", "out.jsonl", "--mcp", server)
    done = run_command(*batch)
    assert done.exit_code == 0, done.output
    assert ECHOED in json.loads((folder / "out.jsonl").read_text())["answers"][0]
    workers = run_command(*batch, "--runner", "dbos")
    assert workers.exit_code == 2
    assert "--mcp is for --runner asyncio" in workers.output


def test_workflow_uses_mcp_tools(folder: Path, server: str) -> None:
    """Servers are given on the command line, also when resuming, and never in a workflow file."""
    (folder / "flow.toml").write_text(STEPS)
    done = run_command("run", "steps", "flow.toml", "--mcp", server, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert ECHOED in report["results"]["a"]
    repeated = run_command(
        "run", "steps", "--resume", report["workflow"], "--mcp", server, "--json"
    )
    assert repeated.exit_code == 0, repeated.output
    (folder / "flow.toml").write_text('mcp = ["x"]\n[[steps]]\nname = "a"\nprompt = "b"\n')
    rejected = run_command("run", "steps", "flow.toml")
    assert "unknown member 'mcp'" in rejected.output


def test_without_a_terminal_calls_are_denied(folder: Path) -> None:
    """Without a terminal, ``--approve`` denies calls, and the model gets the reason."""
    done = run_command("chat", "--approve", stdin="Call clock with {}")
    assert "there is no terminal at which it could be approved" in done.output


@pytest.mark.parametrize(
    ("line", "decision"),
    [("y\n", Allow()), ("YES\n", Allow()), ("n\n", Deny("the user denied it")), ("\n", None)],
)
async def test_user_approves_calls_at_the_terminal(
    line: str,
    decision: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prompt shows the arguments, shortened and without control characters, and ends with the name."""
    answers = Terminal(line)
    monkeypatch.setattr(sys, "stdin", answers)
    call = tool_call("rm\x1b", json.dumps({"path": "x" * 3_000}))
    assert await ask_approval(call) == (decision or Deny("the user denied it"))
    prompt = capsys.readouterr().err
    assert prompt.startswith('\nArguments: {"path": "xxx')
    assert prompt.endswith("more characters are hidden)\nRun rm\\x1b? [y/N]: ")
    answers.close()


async def test_approval_prompt_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled prompt does not read input that is typed later."""
    answers = Terminal("")
    monkeypatch.setattr(sys, "stdin", answers)
    task = asyncio.create_task(ask_approval(tool_call("rm", {})))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers.type("y\n")
    assert answers.readline() == "y\n"
    answers.close()


class Terminal(io.TextIOWrapper):
    """A standard input that is a pipe and claims to be a terminal."""

    def __init__(self, text: str) -> None:
        source, self.typed = os.pipe()
        super().__init__(os.fdopen(source, "rb", buffering=0))  # type: ignore[arg-type]
        self.type(text)

    def type(self, text: str) -> None:
        """Write to the other end of the pipe."""
        os.write(self.typed, text.encode())

    def isatty(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close both ends of the pipe."""
        if not self.closed:
            os.close(self.typed)
        super().close()
