"""Tests of the eight programs of ``make bench-peers``, those with Kedge run."""

import json
import re
import sys
from pathlib import Path

from benchmarks.peers.programs import EXPECTED, TITLES, check_program, get_path

from forked import run_forked
from kedge.testing import serve

RUN_PROGRAMS = """
import contextlib, io, json, runpy, sys
folder, path, base_url, *names = sys.argv[1:]
sys.path.insert(0, folder)
printed = {name: io.StringIO() for name in names}
for name, output in printed.items():
    sys.argv = [path, name, base_url, ""]
    with contextlib.redirect_stdout(output):
        runpy.run_path(path, run_name="__main__")
print(json.dumps({name: output.getvalue() for name, output in printed.items()}))
"""
"""Runs programs one after another in one process, which imports Kedge once."""


def test_program_prints_what_is_expected(tmp_path: Path) -> None:
    """Each program with Kedge prints what ``make bench-peers`` expects of every library."""
    check_program(Path(sys.executable), "kedge", "resume")
    names = sorted(TITLES.keys() - {"resume"})
    with serve() as server:
        arguments = [str(get_path("kedge").parent), str(get_path("kedge")), server.base_url, *names]
        done = run_forked("-c", RUN_PROGRAMS, *arguments, cwd=tmp_path, check=True)
    printed = json.loads(done.stdout)
    wrong = [name for name in names if not re.fullmatch(EXPECTED[name], printed[name].strip())]
    assert wrong == [], printed
