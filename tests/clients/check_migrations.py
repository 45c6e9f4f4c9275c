"""Run the programs of the migration pages that use other libraries, on a local server.

The first program of a page (``py``) prints what Kedge's program below it prints. A second one continues the first: it
converts its history, and a ``text`` block shows what it prints.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kedge.testing import serve

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PACKAGES = {
    "migrate-openai.md": "openai",
    "migrate-pydantic-ai.md": "pydantic-ai-slim",
    "migrate-openai-agents.md": "openai-agents",
    "migrate-langchain.md": "langchain-openai",
}
PROGRAM = re.compile(
    r"^```py\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?", re.DOTALL | re.MULTILINE
)
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def check_migrations() -> Iterator[tuple[str, str, bool]]:
    """Yield the package of each page, what was run, and whether it printed what the page shows."""
    for name, package in PACKAGES.items():
        page = (GUIDES / name).read_text(encoding="utf-8").partition("## Six programs")[0]
        program, expected = "", OUTPUT.findall(page)[0]
        passed = True
        for number, each in enumerate(PROGRAM.finditer(page)):
            program += each["code"]
            expected += each["printed"] or "" if number else ""
            printed = run_program(program)
            if printed != expected:
                print(f"docs/guides/{name} printed {printed!r}, not {expected!r}", file=sys.stderr)
                passed = False
        yield package, f"docs/guides/{name}", passed


def run_program(code: str) -> str:
    """Run a program in an empty folder and return what it prints, or its error."""
    with serve() as server, tempfile.TemporaryDirectory() as folder:
        variables = {
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "any",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    return done.stdout + (done.stderr[-2000:] if done.returncode else "")
