"""Eight small programs, written with four libraries: run them, check what they print, and count their code lines.

    python -m benchmarks.peers.programs ENVIRONMENTS [NAME …]

``ENVIRONMENTS`` is a folder with a virtual environment per library; ``make bench-peers`` makes it. Each program
runs in its own process on the same local server and must print what ``EXPECTED`` says, whatever the library. The
lines are those after ``ruff format``, without blank lines, comments, imports and the connection. The table is
written to docs/peers.md if all libraries ran.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kedge.testing import serve

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "peers.md"
LIBRARIES = ("kedge", "openai", "pydantic-ai", "openai-agents")
BEGIN, END = "<!-- table of the programs -->\n", "<!-- end of the programs -->\n"
TITLES = {
    "remember": "chat with memory",
    "stream": "streaming",
    "approve": "two tools, one with approval",
    "parse": "typed output",
    "edit": "edit an earlier message and continue",
    "fork": "fork two branches and compare them",
    "summarize": "summarize old history",
    "resume": "resume in another process",
}
EXPECTED = {
    "remember": r"Your name is Ada\.",
    "stream": "1 2 3",
    "approve": r"add says: 5\.\nAllow remove\?\nremoving notes\nremove says: removed notes\.",
    "parse": "city='Lisbon' days=3",
    "edit": r"Your name is Grace\.",
    "fork": r'My ship is the Terror\.\nYou said: "My ship is the Terror\." \(I can see 3 messages\.\)',
    "summarize": r"I can see [3-8] messages: .*",  # 17 without a summary
    "resume": r"Your name is Ada\.",
}
"""What each program prints, as a regular expression."""
ARGUMENTS = {"resume": ["My name is Ada.", "What is my name?"]}
"""The messages of programs that run once for each of them, in separate processes."""


def get_path(library: str) -> Path:
    """Return the file with the programs of a library."""
    return FOLDER / f"programs_{library.replace('-', '_')}.py"


def run_program(python: Path, library: str, name: str) -> str:
    """Run a program and return what its last process prints."""
    output = ""
    with serve() as server, tempfile.TemporaryDirectory() as folder:
        for argument in ARGUMENTS.get(name, [""]):
            command = [str(python), str(get_path(library)), name, server.base_url, argument]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{library} {name}: {done.stderr}")
            output = done.stdout.strip()
    return output


def check_program(python: Path, library: str, name: str) -> None:
    """Run a program and check what it prints."""
    output = run_program(python, library, name)
    if not re.fullmatch(EXPECTED[name], output):
        raise AssertionError(f"{library} {name} printed {output!r}, not {EXPECTED[name]!r}")


def count_lines(library: str) -> dict[str, int]:
    """Return the number of code lines of each program of a library."""
    text = get_path(library).read_text(encoding="utf-8")
    lines = text.splitlines()
    functions = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
    return {
        each.name: sum(
            bool(line.strip()) and not line.strip().startswith("#")
            for line in lines[each.lineno - 1 : each.end_lineno]
        )
        for each in functions
    }


def format_table() -> str:
    """Return the code lines of all programs as a table in Markdown."""
    counts = {library: count_lines(library) for library in LIBRARIES}
    lines = [f"| code lines | {' | '.join(LIBRARIES)} |", "|---" * (len(LIBRARIES) + 1) + "|"]
    for name, title in TITLES.items():
        cells = " | ".join(str(counts[library][name]) for library in LIBRARIES)
        lines.append(f"| {title} | {cells} |")
    sums = " | ".join(f"**{sum(counts[library].values())}**" for library in LIBRARIES)
    return "\n".join([*lines, f"| all | {sums} |"]) + "\n"


def main(environments: str, *names: str) -> None:
    """Check the programs of the libraries, print the table and, for all of them, write the page."""
    for library in [each for each in LIBRARIES if not names or each in names]:
        python = Path(sys.executable)
        if library != "kedge":
            python = Path(environments) / library / "bin" / "python"
        for name in TITLES:
            check_program(python.absolute(), library, name)
    print(format_table())
    if not names:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        page = f"{head}{BEGIN}\n{format_table()}\n{END}{rest.split(END)[1]}"
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
