"""What a benchmark returns, and how it is shown: ratios against a baseline of the same run."""

import gc
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. ``limit`` is what we aim for; it is shown, never asserted."""

    what: str
    value: float
    limit: float | None = None
    unit: str = "x"
    detail: str = ""


def cpu_seconds(work: Callable[[], object], *, repeat: int = 5, number: int = 1) -> float:
    """CPU seconds of one call of ``work``: the least of ``repeat`` rounds of ``number`` calls."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        try:
            start = time.process_time_ns()
            for _ in range(number):
                work()
            best = min(best, (time.process_time_ns() - start) / 1e9 / number)
        finally:
            gc.enable()
    return best


def print_and_save(name: str, rows: Sequence[Row]) -> None:
    """Print the table and write it to ``benchmarks/results/<name>.json``."""
    width = max(len(row.what) for row in rows)
    print(f"\n{name}")
    for row in rows:
        limit = "" if row.limit is None else f"aim {row.limit:g}{row.unit}"
        print(f"  {row.what:<{width}}  {row.value:>10.4g}{row.unit:<3} {limit:<14} {row.detail}")
    RESULTS.mkdir(exist_ok=True)
    report = {
        "benchmark": name,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
