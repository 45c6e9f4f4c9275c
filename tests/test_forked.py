"""Tests of the processes that are forks: they behave like processes of a new interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forked import ForkedProcess, run_forked

REPORT = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("KEDGE_COLOR"), sys.stdin.read(), len(os.listdir("/proc/self/fd")))
print("problem", file=sys.stderr)
sys.exit(3)
"""


def test_a_fork_has_arguments_folder_environment_streams_and_exit_code(tmp_path: Path) -> None:
    """A fork and a new interpreter with the same program write the same, and end with the same code."""
    environ = {**os.environ, "KEDGE_COLOR": "blue"}
    forked = run_forked("-c", REPORT, "a", "b", text="typed", cwd=tmp_path, env=environ)
    new = subprocess.run(
        [sys.executable, "-c", REPORT, "a", "b"],
        input="typed",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=environ,
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, new.stdout, new.stderr)


def test_a_fork_runs_modules_and_files(tmp_path: Path) -> None:
    """A module and a file run as the main program, and import what is beside them."""
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "program.py").write_text(
        "import beside, sys\nprint(__name__, beside.NAME, sys.argv)"
    )
    path = str(tmp_path / "program.py")
    expected = "__main__ beside "
    assert run_forked(path, "x", check=True).stdout == f"{expected}{[path, 'x']}\n"
    assert run_forked("-m", "program", cwd=tmp_path, check=True).stdout.startswith(expected)
    assert run_forked("-c", "print(1)", text=b"").stdout == b"1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fork_ends_by_a_signal(number: signal.Signals) -> None:
    """A signal ends the process while others run, and its exit code names the signal."""
    code = "print('started', flush=True)\nimport threading\nthreading.Event().wait()"
    arguments = ["-c", code]
    pipe = subprocess.PIPE
    with (
        ForkedProcess(arguments, stdout=pipe, stderr=pipe) as other,
        ForkedProcess(arguments, stdout=pipe, stderr=pipe) as process,
    ):
        for each in (process, other):
            assert each.stdout is not None
            assert each.stdout.readline() == b"started\n"
        assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert other.poll() is None
        other.kill()
    assert process.returncode == -number
    assert errors.endswith(b"KeyboardInterrupt\n") == (number == signal.SIGINT)


END = """
import atexit, sys, threading
atexit.register(print, "last")
threading.Timer(0.01, print, ["thread"]).start()
sys.exit("the reason")
"""


def test_a_fork_ends_like_an_interpreter() -> None:
    """Its threads end first, then its exit functions run, and a text as its exit code is written."""
    done = run_forked("-c", END)
    assert (done.returncode, done.stdout, done.stderr) == (1, "thread\nlast\n", "the reason\n")
