"""What a benchmark returns, and how it is shown: ratios against a baseline of the same run."""

import gc
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. ``limit`` is what we aim for; it is shown, never asserted.

    ``baseline`` is what a ratio is a ratio of, if it is not the ``BASELINE`` of the benchmark.
    """

    what: str
    value: float
    limit: float | None = None
    unit: str = "x"
    detail: str = ""
    baseline: str = ""


def cpu_seconds(work: Callable[[], object], *, repeat: int = 5, number: int = 1) -> float:
    """CPU seconds of one call of ``work``: the least of ``repeat`` rounds of ``number`` calls."""
    (best,) = compare_cpu(work, repeat=repeat, number=number)
    return best


def compare_cpu(*works: Callable[[], object], repeat: int = 5, number: int = 1) -> list[float]:
    """CPU seconds of one call of each, measured in turn: a busy machine then slows all of them."""
    best = [float("inf")] * len(works)
    for _ in range(repeat):
        for i, work in enumerate(works):
            gc.collect()
            gc.disable()
            try:
                start = time.process_time_ns()
                for _ in range(number):
                    work()
                best[i] = min(best[i], (time.process_time_ns() - start) / 1e9 / number)
            finally:
                gc.enable()
    return best


def print_heading() -> None:
    """Print the names of the columns."""
    _print_line("benchmark", "what", "value", "aim", "baseline", "figures")


def print_and_save(name: str, baseline: str, rows: Sequence[Row]) -> None:
    """Print lines of the table and write them to ``benchmarks/results/<name>.json``."""
    rows = [
        replace(row, baseline=row.baseline or baseline) if row.unit == "x" else row for row in rows
    ]
    for row in rows:
        aim = "" if row.limit is None else f"{row.limit:g}{row.unit}"
        _print_line(
            name, row.what, f"{row.value:.4g}{row.unit}", aim, row.baseline or "none", row.detail
        )
    RESULTS.mkdir(exist_ok=True)
    report = {
        "benchmark": name,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")


def _print_line(name: str, label: str, value: str, aim: str, baseline: str, detail: str) -> None:
    print(f"{name:<11} {label:<58} {value:>9} {aim:>7}  {baseline:<44} {detail}", flush=True)
