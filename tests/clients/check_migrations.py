"""Run the programs of the migration pages, also those that use other libraries, on a local server.

They are run as by a reader: in order, each as a file, in one folder. Each prints the next ``text`` block of its page.
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
    r"^```(?:py|python)\n(?P<code>.*?)^```$(?=.*?^```text\n(?P<printed>.*?)^```$)",
    re.DOTALL | re.MULTILINE,
)


def check_migrations() -> Iterator[tuple[str, str, bool]]:
    """Yield the package of each page, what was run, and whether it printed what the page shows."""
    for name, package in PACKAGES.items():
        problems = check_guide(GUIDES / name)
        print(*problems, sep="\n", end="", file=sys.stderr)
        yield package, f"docs/guides/{name}", not problems


def check_guide(page: Path) -> list[str]:
    """Run the programs of a page in a new folder, and return what they printed that the page does not show."""
    text = page.read_text(encoding="utf-8").partition("## Six programs")[0]
    programs = list(PROGRAM.finditer(text))
    problems: list[str] = []
    with serve() as server, tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(programs, 1):
            printed = run_program(program["code"], Path(folder), server.base_url)
            if printed != program["printed"]:
                shown = f"{printed!r}, not {program['printed']!r}"
                problems.append(f"{page.name}: program {number} printed {shown}")
    return problems


def run_program(code: str, folder: Path, base_url: str) -> str:
    """Run a program as a file in a folder, and return what it prints, or its error."""
    file = folder / "program.py"
    file.write_text(code, encoding="utf-8")
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "any",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    done = subprocess.run(
        [sys.executable, file.name],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + (done.stderr[-2000:] if done.returncode else "")
