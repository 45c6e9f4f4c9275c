"""A sample store for the tests of commands: conversations with forks, and their server."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kedge._internal.event_loops import run_sync
from kedge.cli import group
from kedge.cli.store_options import model_references, remember
from kedge.config import store_url
from kedge.conversation import Conversation
from kedge.conversation.lookup import MODEL_KEY
from kedge.store import open_store
from kedge.testing import serve
from kedge.testing.server import TestServer


def run_command(*arguments: str, stdin: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(group, arguments, input=stdin)


def run_json(*arguments: str, stdin: str | None = None) -> Any:
    """Run a command with ``--json`` and return its output."""
    result = run_command(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def execute(path: Path, *statements: str) -> None:
    """Change the tables of a database."""
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


@contextmanager
def serve_sample_store(path: Path) -> Iterator[TestServer]:
    """Yield a server and create a store with the conversation ``harbour`` and its fork ``quay``.

    Nodes: 1 root; 2, 3 the first question and its answer; 4, 5 the second; 6, 7 another second
    question and its answer, after an undo; 8, 9 a third, on the fork.
    """
    with serve() as server:
        model = f"responses:{server.base_url}#practice"
        remember(model_references(model))
        run_sync(_create_conversations(path, model))
        yield server


async def _create_conversations(path: Path, model: str) -> None:
    async with open_store(store_url(str(path))) as store:
        retained = {"title": "harbour", "tags": ["ships"], "data": {MODEL_KEY: model}}
        async with await Conversation.create(model, store=store, **retained) as conversation:
            await conversation.send("My name is Ada.")
            await conversation.send("What is 2+3?")
            await conversation.undo()
            await conversation.send("What is my name?")
            forked = await conversation.fork(title="quay")
            await forked.send("What is 3+4?")
