"""Print the packages and megabytes that each core dependency adds, as the table of docs/installation.md.

    .venv/bin/python -m benchmarks.installed_size

A package that several dependencies require is counted once, in the last row. Compiled caches are not counted.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path

from benchmarks.peers.size import find_requirements, measure_size

PURPOSES = {
    "aiohttp": "requests to every provider",
    "httpx2": "`kedge proxy`, and the certificates of the system",
    "markupsafe": "the web page",
    "pydantic": "tools, typed output, the page's API",
    "pydantic-core": "tools, typed output",
    "referencing": "validation of typed output",
    "prompt-toolkit": "input of several lines in `kedge chat`",
    "tiktoken": "exact token counts",
    "rich": "Markdown and color in the terminal",
    "jsonschema": "validation of tool arguments and typed output",
    "jinja2": "the web page",
    "websockets": "WebSockets of the server and of engines",
    "msgspec": "JSON",
    "anyio": "tasks and cancellation",
    "click": "the command line",
    "h11": "the embedded server",
    "uvicorn": "the embedded server",
    "starlette": "the embedded server",
    "markdown-it-py": "Markdown on the web page",
    "prometheus-client": "metrics",
    "docstring-parser": "descriptions of tools",
    "typing-extensions": "types",
}


def list_core() -> list[str]:
    """Return the names of the core dependencies."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]


def build_table() -> str:
    """Return the table, the largest dependency first."""
    required = {name: find_requirements((name,)) for name in list_core()}
    owners = Counter(package for packages in required.values() for package in packages)
    shared = {package for package, count in owners.items() if count > 1}
    rows = [
        (measure_size(packages - shared | {name}), len(packages - shared | {name}), name)
        for name, packages in required.items()
    ]
    common = shared - set(required)
    lines = ["| dependency | needed for | packages | MB |", "|---|---|---|---|"]
    for size, count, name in sorted(rows, reverse=True):
        lines.append(f"| `{name}` | {PURPOSES[name]} | {count} | {size:.1f} |")
    lines.append(f"| shared by several | | {len(common)} | {measure_size(common):.1f} |")
    total = sum(row[0] for row in rows) + measure_size(common)
    lines.append(f"| all of them | | {len(owners)} | {total:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(build_table())
