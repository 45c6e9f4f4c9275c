"""Test loading several models from a file, and the errors for an invalid file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from for_each import for_each
from kedge.errors import CannotConnect, InvalidScript, InvalidSetting
from kedge.providers import Models, load_models, open_model
from kedge.testing import TestServer, serve
from server.engine_models.conftest import open_client


def write_models(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


@contextmanager
def connect_models(models: Models) -> Iterator[OpenAI]:
    """Yield a client of a server with these models."""
    with (
        serve(models=models.models, default=models.default) as server,
        open_client(server) as client,
    ):
        yield client


def test_models_are_found_by_their_names(tmp_path: Path, upstream: TestServer) -> None:
    """Each model is served under its name, all are listed, and an unknown name is rejected or that of the default."""
    tables = f"""
        [models.here]
        model = "practice"
        window = 1000

        [models.there]
        model = "chat:{upstream.base_url}#practice"
        [models.there.params]
        temperature = 0.5
        """
    models = load_models(write_models(tmp_path, tables))
    with connect_models(models) as client:
        assert [model.id for model in client.models.list()] == ["here", "there"]
        assert client.responses.create(model="here", input="Hello").model == "here"
        assert upstream.requests == []
        assert client.responses.create(model="there", input="Hello").model == "there"
        sent = upstream.requests[-1].body
        assert (sent["model"], sent["temperature"]) == ("practice", 0.5)
        with pytest.raises(openai.BadRequestError) as exc_info:
            client.responses.create(model="other", input="Hello")
        assert (exc_info.value.code, exc_info.value.param) == ("model_not_found", "model")
        hello: Any = [{"role": "user", "content": "Hello"}]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=hello)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="context"):
            client.responses.create(model="here", input="words " * 2000)
    models = load_models(write_models(tmp_path, f'default = "here"{tables}'))
    with connect_models(models) as client:
        assert client.responses.create(model="gpt-5", input="Hello").output_text


INVALID_FILES = [
    ("", "no models; write a table [models.NAME]"),
    ("models = 5", "no models"),
    ("[models", "is not TOML"),
    ("[model.a]\n", "unknown key 'model'; did you mean models?"),
    ("[models]\na = 5", "models.a must be a table"),
    ("[models.a]\n", 'models.a needs a model: model = "ollama:llama3.2"'),
    ('[models.a]\nmodle = "practice"', "unknown key 'modle'; did you mean model?"),
    ("[models.a]\nmodel = 5", "models.a.model must be a model string"),
    ('[models.a]\nmodel = "practice"\nwindow = 0', "models.a.window must be an integer"),
    ('[models.a]\nmodel = "practice"\nwindow = true', "models.a.window must be an integer"),
    ('[models.a]\nmodel = "practice"\nstateless = 1', "models.a.stateless must be true or false"),
    ('default = "b"\n[models.a]\nmodel = "practice"', "default must be one of a, not 'b'"),
    ('[models.a]\nmodel = "practice"\napi_key = "sk-123"', "does not belong in a file"),
    ('[models.a]\nmodel = "olama:x"', "models.a: no provider named 'olama'"),
    ('[models.a]\nmodel = "practice"\nkey_env = "KEDGE_NO_SUCH"', "KEDGE_NO_SUCH is not set"),
]


@for_each(("text", "message"), INVALID_FILES)
def test_an_error_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """An error names the key and the correct form in one line and never contains the secret."""
    with pytest.raises((InvalidSetting, CannotConnect)) as exc_info:
        load_models(write_models(tmp_path, text))
    assert message in str(exc_info.value)
    assert "sk-123" not in str(exc_info.value)
    assert "\n" not in str(exc_info.value)
    with pytest.raises(InvalidSetting, match="cannot read"):
        load_models(tmp_path / "nowhere.toml")


def test_only_a_regular_file_of_models_is_read(tmp_path: Path) -> None:
    """Named pipes as the file of models or of a script are reported instead of waited for."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(InvalidSetting, match="it is not a regular file"):
        load_models(pipe)
    with pytest.raises(InvalidScript, match="it is not a regular file"):
        open_model(f"script:{pipe}")


def test_key_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's key is read from the environment variable named by ``key_env``."""
    monkeypatch.setenv("MY_KEY", "secret")
    with serve(token="secret") as guarded:
        table = f'[models.a]\nmodel = "chat:{guarded.base_url}#practice"\nkey_env = "MY_KEY"\n'
        with connect_models(load_models(write_models(tmp_path, table))) as client:
            assert client.responses.create(model="a", input="Hello").output_text
