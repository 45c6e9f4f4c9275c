"""What starting the command line costs: CPU of a process of its own, against a bare interpreter.

Bytecode is written and used, as it is after an installation. The first run, which compiles, is left out.
"""

import os
import resource
import subprocess
import sys

from benchmarks.table import Row

BASELINE = "a bare interpreter"
REPEAT = 7
TARGET_MS = 150.0
COMMANDS = (("--help",), ("chat", "--help"), ("config", "--json"), ("doctor", "--json"))


def run() -> list[Row]:
    """Measure each command side by side with an interpreter that does nothing."""
    baseline = _measure_cpu("-c", "pass")
    rows: list[Row] = []
    for arguments in COMMANDS:
        took = _measure_cpu("-m", "kedge", *arguments)
        name = f"kedge {' '.join(arguments)}"
        aim = TARGET_MS if "--help" in arguments else None
        rows.append(Row(f"CPU of {name}", took * 1000, aim, "ms"))
        rows.append(Row(name, took / baseline, detail=f"{baseline * 1000:.0f} ms"))
    return rows


def _measure_cpu(*arguments: str) -> float:
    """CPU seconds of a process: the least of several."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    took: list[float] = []
    for _ in range(REPEAT + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, env=environ, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(took[1:])
