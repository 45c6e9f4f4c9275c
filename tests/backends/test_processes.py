"""Test two processes of ``kedge serve``: one runs the model, the other stores the responses."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from cli.test_serve import TIMEOUT, run_serve


@pytest.fixture(scope="module")
def upstream() -> Generator[str]:
    with run_serve("--db", ":memory:", "--no-page") as (_, line):
        yield line["base_url"]


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
        run_serve("--db", ":memory:", "--no-page", "--models", str(models)) as (_, line),
        OpenAI(base_url=line["base_url"], api_key="any", max_retries=0, timeout=TIMEOUT) as client,
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
