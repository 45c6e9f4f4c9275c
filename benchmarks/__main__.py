"""``make bench``: run the benchmarks by name, or all of them, print one table and write it as JSON too.

A benchmark is a module ``bench_<name>.py`` of this folder with ``run() -> list[Row]`` and ``BASELINE``, which says
what its ratios are ratios of.
"""

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.table import print_and_save, print_heading

NAMES = sorted(
    path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
)


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all of them."""
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        sys.exit(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    print_heading()
    for name in names or NAMES:
        benchmark = import_module(f"benchmarks.bench_{name}")
        print_and_save(name, benchmark.BASELINE, benchmark.run())


if __name__ == "__main__":
    main(sys.argv[1:])
