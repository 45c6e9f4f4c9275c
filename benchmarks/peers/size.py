"""Print the version, the installed size and the import time of a library, in its environment.

The size is that of its packages and of everything that they require, not of what else is installed.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

_REPEAT = 5


def find_requirements(names: tuple[str, ...]) -> set[str]:
    """Return the installed packages that the named ones require, with themselves."""
    packages: set[str] = set()
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in packages:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        packages.add(name)
        pending += [re.split(r"[^\w.-]", each)[0] for each in required if "extra ==" not in each]
    return packages


def list_files(name: str) -> Iterator[Path]:
    """List the files of a package; of one that is installed from its sources, also these."""
    for entry in distribution(name).files or ():
        file = Path(str(entry.locate()))
        yield file
        if file.suffix == ".pth":
            yield from Path(file.read_text(encoding="utf-8").strip()).rglob("*")


def measure_size(names: set[str]) -> float:
    """Return the megabytes of the files of packages, without compiled caches."""
    files = (file for name in names for file in list_files(name))
    return sum(f.stat().st_size for f in files if f.suffix != ".pyc" and f.is_file()) / 1e6


def measure_import(modules: tuple[str, ...]) -> float:
    """Return the least CPU seconds of importing modules in a new process."""
    code = f"import time; s = time.process_time(); import {', '.join(modules)}; print(time.process_time() - s)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(_REPEAT)
    ]
    return min(runs)


def describe(name: str) -> dict[str, Any]:
    """Return the figures of a peer."""
    peer = importlib.import_module(f"peer_{name}").PEER
    packages = find_requirements(peer.packages)
    return {
        "version": distribution(peer.packages[0]).version,
        "durable": peer.durable,
        "imports": measure_import(peer.modules),
        "megabytes": measure_size(packages),
        "packages": len(packages),
    }


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
