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
from typing import Any

import httpx2

from for_each import for_each
from kedge.errors import EXTRAS, describe_extra
from source_trees import list_nodes

ROOT = Path(__file__).parents[1]
SERVE = """
import sys
sys.modules.update(dict.fromkeys(("openai", "cryptography")))
from kedge import Turn, connect, user
from kedge.conversation import Chat, new_key
from kedge.cli import main
from kedge.errors import InvalidSetting
from kedge.providers import open_model
from kedge.testing import serve
with serve() as server:
    for settings in {}, {"transport": "websocket"}, {"mode": "stateless"}:
        with connect("openai:practice", base_url=server.base_url, api_key="k", **settings).sync as engine:
            turn = engine.run(Turn([user("My name is Ada.")]))
            turn = engine.run(turn.append(user("What did I say first?")))
            print(turn.blocks[-1].text, flush=True)
with connect("practice", mode="stateless").sync as engine:
    turn = engine.run(Turn([user("Think: My name is Ada.")]))
    turn = engine.run(turn.append(user("What did I say first?")))
    print(turn.blocks[-1].text, flush=True)
    turn = engine.run(turn.append(user("What did you think?")))
    print(turn.blocks[-1].text, flush=True)
with serve() as upstream, serve(model=open_model(f"responses:{upstream.base_url}#practice")) as server:
    with connect(f"responses:{server.base_url}#practice").sync as engine:
        turn = Turn()
        for text in "Think: One.", "Think: Two.", "What did I say first?":
            turn = engine.run(turn.append(user(text)))
        print(turn.blocks[-1].text, flush=True)
try:
    Chat("practice", state_key=new_key())
except InvalidSetting as error:
    print(error, flush=True)
main(["serve", "--port", "0", "--db", ":memory:", "--json"])
"""
"""Without the packages of extras, prints six answers and the error of a key for states, and serves."""
ENCRYPTION = "pip install 'kedge-llm[encryption]'"
SEALED = {"type": "reasoning", "summary": [], "encrypted_content": "Z0FBQQ=="}
ENCRYPTED = [
    ("", {"input": [SEALED, {"role": "assistant", "content": "a"}]}),
    ("", {"input": [{"role": "user", "content": "a"}, {"type": "compaction_trigger"}]}),
    ("/compact", {}),
]
"""Paths and members of requests whose answers would be encrypted."""


def test_engines_and_the_server_need_no_extra(tmp_path: Path) -> None:
    """Engines, the page and chained and streamed responses work; what would be encrypted names the extra."""
    folders = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **folders},
    )
    assert process.stdout is not None
    try:
        answers = [process.stdout.readline() for _ in range(3)]
        assert answers == ['You said first: "My name is Ada."\n'] * 3
        assert process.stdout.readline() == 'You said first: "Think: My name is Ada."\n'
        assert process.stdout.readline() == "I can see no thought of mine.\n"
        assert process.stdout.readline() == 'You said first: "Think: One."\n'
        assert ENCRYPTION in process.stdout.readline()
        urls = json.loads(process.stdout.readline())
        with httpx2.Client(timeout=300, follow_redirects=True) as http:

            def post(path: str = "", **members: Any) -> httpx2.Response:
                body = {"model": "practice", "input": "hi", **members}
                return http.post(f"{urls['base_url']}/responses{path}", json=body)

            assert http.get(urls["page"]).status_code == 200
            first = post(input="My name is Ada.").json()["id"]
            assert "Ada" in post(input="What is my name?", previous_response_id=first).text
            assert "response.completed" in post(stream=True).text
            asked = post(input="Think: hi", include=["reasoning.encrypted_content"])
            assert asked.status_code == 200
            assert asked.headers["kedge-server"] == "kedge; encryption=none"
            reasoning, _ = asked.json()["output"]
            assert reasoning["type"] == "reasoning"
            assert not reasoning.get("encrypted_content")
            for path, members in ENCRYPTED:
                rejected = post(path, **members)
                assert rejected.status_code == 400
                assert ENCRYPTION in rejected.json()["error"]["message"]
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
