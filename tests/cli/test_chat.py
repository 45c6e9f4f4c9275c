"""``kedge chat`` as a person or a script uses it: a real process, real pipes, real signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

KEDGE = [sys.executable, "-m", "kedge"]
TIMEOUT = 60


def chat(lines: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Pipe lines into a chat."""
    return subprocess.run(
        [*KEDGE, "chat", *options],
        input=lines,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        cwd=cwd,
    )


def test_a_piped_conversation_remembers_and_shows_what_was_sent() -> None:
    """Answers come on standard output, and each turn ends with one line of what was sent."""
    done = chat("What is 2+3?\nWhat did I say first?\n")
    assert done.returncode == 0
    assert "2+3 = 5." in done.stdout
    assert 'You said first: "What is 2+3?"' in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("[chained")]
    assert "no anchor, sent 1 of 1 blocks" in told[0]
    assert "on resp_" in told[1]
    assert "sent 1 of 3 blocks" in told[1]
    assert done.stderr == ""


def test_the_built_in_tools_are_real() -> None:
    """The clock tells the time of a place, and a wrong place is told to the model."""
    done = chat("Please call days_between with first=2026-01-01 and second=2026-03-01\n")
    assert "days_between" in done.stdout
    assert "59" in done.stdout


def test_tools_of_ones_own_can_be_offered(tmp_path: Path) -> None:
    """--tool takes a function of a module in the current folder."""
    (tmp_path / "mytools.py").write_text(
        'def shout(text: str) -> str:\n    """Shout."""\n    return text.upper()\n'
    )
    done = chat("Please call shout with text=hello\n", "--tool", "mytools:shout", cwd=tmp_path)
    assert "HELLO" in done.stdout


def test_json_gives_one_object_a_turn() -> None:
    """A script gets text, requests and usage of each turn."""
    done = chat("What is 2+3?\nWhat did I say first?\n", "--json")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["text"] == "2+3 = 5."
    assert first["requests"][0]["anchor"] is None
    assert second["requests"][0]["anchor"].startswith("resp_")
    assert second["requests"][0]["blocks"] == 1
    assert second["usage"]["input_tokens"] > 0


def test_commands_inside_the_chat() -> None:
    """/plan explains, /show lists, /help helps, and an unknown one is said so."""
    done = chat("Hello\n/plan\n/show\n/help\n/nonsense\n/quit\nnot reached\n")
    assert "Chained on resp_" in done.stdout
    assert "0 user        Hello" in done.stdout
    assert "/plan   what the next request" in done.stdout
    assert "no command /nonsense" in done.stdout
    assert "not reached" not in done.stdout


def test_errors_are_one_line_with_a_hint() -> None:
    """A missing key says what to set; the exit code is 1, and there is no traceback."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    done = subprocess.run(
        [*KEDGE, "chat", "--model", "openai:gpt-5.1"],
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == "Error: no key for openai: set OPENAI_API_KEY in the environment"
    assert hint.startswith("Hint: 'kedge doctor'")


def test_an_error_in_the_middle_keeps_the_conversation() -> None:
    """A dead server is told, and the chat goes on to the next line."""
    done = chat("hi\n/show\n", "--model", "responses:http://127.0.0.1:9/v1#x")
    assert "could not reach the server" in done.stderr
    assert "0 blocks" in done.stdout


def test_ctrl_c_during_an_answer_keeps_the_conversation_usable() -> None:
    """The message is taken back, and the next one is answered."""
    talk = subprocess.Popen(
        [*KEDGE, "chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert talk.stdin is not None
    assert talk.stdout is not None
    talk.stdin.write("My name is Ada.\nSlowly write 400 words.\n")
    talk.stdin.flush()
    for line in talk.stdout:
        if line.startswith("> Slowly"):
            break
    assert talk.stdout.read(3)
    talk.send_signal(signal.SIGINT)
    rest, _ = talk.communicate("What did I say last?\n", timeout=TIMEOUT)
    assert "interrupted" in rest
    assert 'You said last: "My name is Ada."' in rest or "My name is Ada." in rest
    assert talk.returncode == 0
