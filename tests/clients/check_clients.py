"""Run real, unmodified clients on Kedge: the commands and files of the documentation, and frameworks.

Run by ``make test-clients``, which installs the clients in separate environments. Each section of ``docs/clients.md``
is run as a reader would do it: a block that begins with a comment naming a file is written to that file, a ``sh``
block is executed, the ``text`` block behind it is what it prints, and a ``console`` block is an interactive session
(see ``terminal.py``; for Open WebUI, see ``check_webui.py``). This is done on the practice model, in front of a
model of each API, and through ``kedge proxy``. For the migration pages, see ``check_migrations.py``. A table shows the
results; the exit code is the number of failures.

    check_clients.py [SECTION ...]   only these sections
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import httpx2
from check_frameworks import check_frameworks, serve_proxy
from check_migrations import check_migrations
from check_webui import run_webui
from terminal import run_session

from kedge.providers import open_model
from kedge.testing import serve

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENTS = ROOT / ".environments"
NODE = ENVIRONMENTS / "node" / "node_modules"
VENV = ENVIRONMENTS / "clients"
OWN_VENVS = {"litellm": ENVIRONMENTS / "litellm", "open-webui": ENVIRONMENTS / "webui"}
"""Environments of clients that need older packages than the others."""
ADDRESS = "http://127.0.0.1:8484"
TIMEOUT = 300
SECTIONS = {
    "Codex": "@openai/codex",
    "Claude Code": "@anthropic-ai/claude-code",
    "openai for Python": "openai",
    "openai for Node": "npm:openai",
    "Vercel AI SDK": "npm:ai",
    "anthropic for Python": "anthropic",
    "pydantic-ai": "pydantic-ai-slim",
    "openai-agents": "openai-agents",
    "LangChain": "langchain-openai",
    "agent-framework": "agent-framework-openai",
    "llm": "llm",
    "LiteLLM": "litellm",
    "Open WebUI": "open-webui",
}
"""Sections of the page that are run, each with the package that it is about."""
BLOCK = re.compile(r"^```(?P<lang>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_COMMENT = re.compile(r"(?:#|//) (?P<path>\S+\.\w+)\n")


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    client: str
    version: str
    what: str
    passed: bool


def find_version(package: str) -> str:
    """Return the installed version of a package of either registry."""
    if package.startswith(("@", "npm:")):
        manifest = NODE / package.removeprefix("npm:") / "package.json"
        return json.loads(manifest.read_text())["version"]
    if package in OWN_VENVS:
        packages = map(str, OWN_VENVS[package].glob("lib/*/site-packages"))
        matches = distributions(name=package, path=list(packages))
        return next(iter(matches)).version
    return version(package)


def read_sections(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return the blocks of each section, as language and text."""
    return {
        section.partition("\n")[0]: [(m["lang"], m["text"]) for m in BLOCK.finditer(section)]
        for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    }


@contextmanager
def serve_practice(unknown_parameters: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Serve the practice model with this setting of ``unknown_parameters``."""
    with serve(unknown_parameters=unknown_parameters) as server:
        yield server.url, lambda: f"practice ({unknown_parameters})"


@contextmanager
def serve_front(kind: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Serve in front of a second server, through an engine of this kind."""
    with serve() as upstream:
        settings: dict[str, Any] = {}
        name = f"{kind}:{upstream.base_url}#practice"
        if kind == "anthropic":
            name, settings = "anthropic:practice", {"base_url": upstream.url, "api_key": "any"}
        with serve(model=open_model(name, **settings)) as server:
            yield server.url, lambda: kind


@contextmanager
def serve_behind_proxy() -> Iterator[tuple[str, Callable[[], str]]]:
    """Serve the practice model through ``kedge proxy``; report how many requests were chained."""
    with serve(unknown_parameters="ignore") as upstream, serve_proxy(upstream.base_url) as base_url:
        url = base_url.removesuffix("/v1")

        def describe() -> str:
            totals = httpx2.get(f"{url}/report").json()
            return f"proxy ({totals['chained']} of {totals['requests']} chained)"

        yield url, describe


SENDS_UNKNOWN = frozenset({"@openai/codex", "@anthropic-ai/claude-code", "litellm"})
"""Clients that send members of no published API, which the practice model rejects by default."""


def list_ways(package: str) -> "list[AbstractContextManager[tuple[str, Callable[[], str]]]]":
    """Return the servers to run a client on; each yields its address and a description."""
    fronts = [serve_front(kind) for kind in ("responses", "chat", "anthropic")]
    setting = "ignore" if package in SENDS_UNKNOWN else "reject"
    return [serve_practice(setting), *fronts, serve_behind_proxy()]


def run_blocks(blocks: list[tuple[str, str]], url: str, package: str) -> str:
    """Write and run the blocks of a section; return a description of the failure, or an empty string."""
    printed = exports = ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        work = home / "work"
        work.mkdir()
        (work / "node_modules").symlink_to(NODE)
        subprocess.run(["git", "init", "-q", work], check=True)
        environment = make_environment(home, package)
        for lang, content in blocks:
            text = content.replace(ADDRESS, url)
            if lang == "text":
                if printed.strip() != text.strip():
                    return f"printed {printed!r}, not {text!r}"
            elif lang == "sh" and package == "open-webui":
                return run_webui(text, url, work, environment)
            elif lang == "sh":
                try:
                    done = run_shell(text, work, environment)
                except subprocess.TimeoutExpired as error:
                    return str(error)
                if done.returncode:
                    return f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
                printed = done.stdout
                exports = "\n".join(re.findall(r"^export .*", text, re.MULTILINE))
            elif lang == "console":
                if failure := run_session(text, home, environment, exports, TIMEOUT):
                    return failure
            elif match := FILE_COMMENT.match(text):
                path = work / match["path"].replace("~", str(home))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            else:
                return f"a block of {lang} does not name its file"
    return ""


def make_environment(home: Path, package: str) -> dict[str, str]:
    """Return the environment of a client's commands, with the clients on the path and an empty home."""
    path = [str(NODE / ".bin"), str(OWN_VENVS.get(package, VENV) / "bin"), os.environ["PATH"]]
    return {
        "HOME": str(home),
        "PATH": os.pathsep.join(path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of downloading it
    }


def run_shell(
    script: str, folder: Path, environment: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run a block of commands."""
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def check_page(page: str, selected: list[str]) -> Iterator[Row]:
    """Run the sections of the page on every server."""
    blocks = read_sections(page)
    for section in selected:
        package = SECTIONS[section]
        installed = find_version(package)
        failures = "" if f"| {installed} |" in page else "the page names another version\n"
        names: list[str] = []
        for server in list_ways(package):
            with server as (url, describe):
                failure = run_blocks(blocks[section], url, package)
                names.append(f"{describe()}{': failed' if failure else ''}")
                failures += f"{describe()}: {failure}\n" if failure else ""
        print(section, f"FAILED\n{failures}" if failures else "passed", file=sys.stderr)
        yield Row(section, installed, f"docs/clients.md on {', '.join(names)}", not failures)


def check_all(names: list[str]) -> Iterator[Row]:
    """Run the page, and the frameworks unless sections were chosen."""
    yield from check_page(PAGE.read_text(encoding="utf-8"), names or list(SECTIONS))
    if not names:
        for package, what, passed in (*check_migrations(), *check_frameworks()):
            yield Row(package, find_version(package), what, passed)


def main() -> int:
    """Run everything, print the table and return the number of failures."""
    rows = list(check_all(sys.argv[1:]))
    cells = [("client", "version", "what was run", "result")]
    cells += [(r.client, r.version, r.what, "passed" if r.passed else "FAILED") for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    failures = sum(not row.passed for row in rows)
    print(f"{len(rows) - failures} passed, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
