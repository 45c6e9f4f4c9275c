"""Tests of the processes that are forks: they behave like processes of a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

from forked import run_forked

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


END = """
import atexit, sys, threading
atexit.register(print, "last")
threading.Timer(0.01, print, ["thread"]).start()
sys.exit("the reason")
"""
