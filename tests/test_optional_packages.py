"""Test Kedge without its extras: packages that are not installed are missing for their own features only."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import httpx2
import pytest

from for_each import for_each
from kedge.errors import EXTRAS, describe_extra
from source_trees import list_nodes

ROOT = Path(__file__).parents[1]
BLOCKED = "import sys\nsys.modules.update(dict.fromkeys(('openai', 'cryptography')))\n"
"""Makes the packages of extras impossible to import."""
CLI = "from kedge.cli import main\nmain(sys.argv[1:])\n"
SERVE = """
from kedge.testing import serve
import asyncio, httpx2
http = httpx2.Client(timeout=300)
"""
ENCRYPTION = "pip install 'kedge-llm[encryption]'"


def make_environment(folder: Path) -> dict[str, str]:
    """Return an environment whose files are in a folder."""
    folders = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder))
    return {**os.environ, **folders, "OPENAI_API_KEY": "sk-1"}


RESPONSES = """
with serve() as server:
    post = lambda **body: http.post(server.base_url + "/responses", json={"model": "practice", **body})
    first = post(input="My name is Ada.").json()
    chained = post(input="What did I say first?", previous_response_id=first["id"]).json()
    print(chained["output"][-1]["content"][0]["text"])
    print("response.completed" in post(input="hi", stream=True).text)
    for body in (
        {"include": ["reasoning.encrypted_content"]},
        {"input": [
            {"type": "reasoning", "summary": [], "encrypted_content": "Z0FBQQ=="},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]},
        {"input": [{"role": "user", "content": "a"}, {"type": "compaction_trigger"}]},
    ):
        rejected = post(**{"input": "hi", **body})
        print(rejected.status_code, rejected.json()["error"]["message"])
    compacted = http.post(server.base_url + "/responses/compact", json={"model": "practice", "input": "hi"})
    print(compacted.status_code, compacted.json()["error"]["message"])
"""


ENGINES = """
from kedge import Turn, connect, user
async def run(model, **settings):
    async with connect(model, **settings) as engine:
        turn = await engine.run(Turn([user("My name is Ada.")]))
        turn = await engine.run(turn.append(user("What did I say first?")), streaming=True)
        print(turn.blocks[-1].text)
with serve() as server:
    for settings in ({}, {"transport": "websocket"}, {"mode": "stateless"}):
        asyncio.run(run("openai:practice", base_url=server.base_url, **settings))
    print([request.status for request in server.requests].count(400))
for mode in ("chained", "stateless"):
    asyncio.run(run("practice", mode=mode))
"""


STATES = """
from kedge.chat import Chat, new_key
from kedge.errors import InvalidSetting
try:
    Chat("practice", state_key=new_key())
except InvalidSetting as error:
    print(error)
"""


PROGRAMS = {"server": RESPONSES, "models": ENGINES, "states": STATES}
RUN_PROGRAMS = (
    BLOCKED
    + SERVE
    + """
import contextlib, io, json
printed = {}
for name, program in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program)
    printed[name] = output.getvalue().splitlines()
print(json.dumps(printed))
"""
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run the programs in one process without the packages, and return the lines that each printed."""
    folder = tmp_path_factory.mktemp("blocked")
    done = subprocess.run(
        [sys.executable, "-c", RUN_PROGRAMS, json.dumps(PROGRAMS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=make_environment(folder),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "again" not in done.stderr  # of a conversation that is not continued
    return json.loads(done.stdout)


def test_server_needs_no_extra(printed: dict[str, list[str]]) -> None:
    """Chained and streamed responses are answered; what would be encrypted is rejected with the extra's name."""
    lines = printed["server"]
    assert "My name is Ada." in lines[0]
    assert lines[1] == "True"
    assert len(lines) == 6
    assert all(line.startswith("400 ") and ENCRYPTION in line for line in lines[2:]), lines


def test_models_need_no_extra(printed: dict[str, list[str]]) -> None:
    """``openai:`` models work over HTTP and WebSocket and in stateless mode, and so does the practice model."""
    lines = printed["models"]
    answers = [*lines[:3], *lines[4:]]
    assert len(answers) == 5
    assert all("My name is Ada." in line for line in answers), answers


def test_encrypted_states_name_the_extra(printed: dict[str, list[str]]) -> None:
    """A key for states is rejected with the command that installs the package."""
    assert ENCRYPTION in printed["states"][0]


def test_serve_and_its_page_need_no_extra(tmp_path: Path) -> None:
    """``kedge serve`` starts, its page is shown, and its server answers."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED + CLI, "serve", "--port", "0", "--db", ":memory:", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=make_environment(tmp_path),
    )
    assert process.stdout is not None
    try:
        urls = json.loads(process.stdout.readline())
        assert httpx2.get(urls["page"], follow_redirects=True, timeout=300).status_code == 200
        body = {"model": "practice", "input": "hi"}
        answer = httpx2.post(f"{urls['base_url']}/responses", json=body, timeout=300)
        assert answer.json()["status"] == "completed"
    finally:
        process.kill()
        process.communicate()


UNDECLARED = {"anthropic", "pytest"}
"""Packages that only their users have: clients that they pass to an engine, and the plugin for their tests."""


def test_every_imported_package_is_declared() -> None:
    """A package that Kedge imports itself is a dependency or in an extra, not only one of a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[^\w-]", each)[0] for group in listed for each in group}
    imported: set[str] = set()
    for node in chain.from_iterable(list_nodes().values()):
        if isinstance(node, ast.Import):
            imported |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    packages = packages_distributions()
    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"kedge"}
        if declared.isdisjoint(
            re.sub(r"[-_.]+", "-", each).lower() for each in packages.get(name, [name])
        )
    }
    assert undeclared == UNDECLARED


@for_each("extra", EXTRAS)
def test_every_extra_is_declared(extra: str) -> None:
    """The table of extras has those of pyproject.toml, each with a package of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert declared.keys() == EXTRAS.keys()
    names = [re.split(r"[^\w-]", each)[0] for each in declared[extra]]
    assert EXTRAS[extra][0] in names
    assert f"pip install 'kedge-llm[{extra}]'" in describe_extra(extra)
