"""Test two processes of ``kedge serve``: one runs the model, the other stores the responses."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from server.waiting import TIMEOUT

SERVE_COMMAND = [
    sys.executable,
    "-m",
    "kedge",
    "serve",
    "--port",
    "0",
    "--db",
    ":memory:",
    "--no-page",
]


@contextmanager
def run_serve(*options: str) -> Generator[str]:
    """Run the command until the block ends, and yield its base URL."""
    process = subprocess.Popen(
        [*SERVE_COMMAND, "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield json.loads(line)["base_url"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def upstream() -> Generator[str]:
    with run_serve() as address:
        yield address


def test_stateless_process_is_chained(upstream: str, tmp_path: Path) -> None:
    """A models file with a default adds stored responses to a stateless server in another process."""
    models = tmp_path / "models.toml"
    models.write_text(
        f"""
        default = "plain"
        [models.plain]
        model = "chat:{upstream}#practice"
        [models.chained]
        model = "responses:{upstream}#practice"
        """
    )
    with (
        run_serve("--models", str(models)) as address,
        OpenAI(base_url=address, api_key="any", max_retries=0, timeout=TIMEOUT) as client,
    ):
        assert [model.id for model in client.models.list()] == ["plain", "chained"]
        for name in ("plain", "chained", "whatever"):
            first = client.responses.create(model=name, input="My name is Ada.")
            second: Any = list(
                client.responses.create(
                    model=name,
                    input="What did I say first?",
                    previous_response_id=first.id,
                    stream=True,
                )
            )[-1]
            assert second.response.output_text == 'You said first: "My name is Ada."'


def test_unreachable_model_is_reported() -> None:
    """An unreachable model is reported with status 503, and the conversation stays empty."""
    with (
        run_serve("--model", "chat:http://127.0.0.1:9/v1#practice") as address,
        OpenAI(base_url=address, api_key="any", max_retries=0, timeout=TIMEOUT) as client,
    ):
        conversation = client.conversations.create()
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as exc_info:
            client.responses.create(model="any", input="Hello", conversation=conversation.id)
        assert exc_info.value.status_code == 503
        assert client.conversations.items.list(conversation.id).data == []
