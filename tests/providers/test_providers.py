"""Model strings, and the one line that tells what is missing."""

from typing import Any

import pytest

import kedge.providers
from kedge.engines import ResponsesEngine
from kedge.errors import CannotConnect
from kedge.loops import run_sync
from kedge.providers import connect
from kedge.turns import Turn, user


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("openai:gpt-5.1", "set OPENAI_API_KEY"),
        ("xai:grok-4", "set XAI_API_KEY"),
        ("azure:mine", "set AZURE_OPENAI_API_KEY"),
        ("openai:", "openai:gpt-5.1"),
        ("opnai:gpt", "did you mean 'openai'"),
        ("zzz", "practice"),
        ("responses:localhost", "responses:http://"),
        ("practice:bigger", "drop 'bigger'"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    model: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key, an unknown name or half an address tells what to set."""
    for name in ("OPENAI_API_KEY", "XAI_API_KEY", "AZURE_OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CannotConnect) as caught:
        connect(model)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_azure_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resource's endpoint comes from the environment; its path is ours to add."""
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "k")
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT", raising=False)
    with pytest.raises(CannotConnect, match="AZURE_OPENAI_ENDPOINT"):
        connect("azure:mine")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://mine.openai.azure.com/")
    engine = connect("azure:mine")
    assert isinstance(engine, ResponsesEngine)
    assert engine.scope.startswith("azure/mine.openai.azure.com/openai/v1/")


def test_the_practice_model_needs_nothing() -> None:
    """The embedded server answers over real HTTP, and its scope is its name."""
    engine = connect("practice")
    turn = run_sync(engine.run(Turn([user("What is 2+3?")])))
    assert "5" in str(turn.blocks[-1])
    turn = run_sync(engine.run(turn.append(user("What did I say first?"))))
    assert "What is 2+3?" in str(turn.blocks[-1])
    assert isinstance(engine, ResponsesEngine)
    assert engine.scope == "practice"


def test_other_packages_add_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group kedge.providers is a provider; it cannot replace ours."""
    asked: list[tuple[str, Any]] = []

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            return lambda rest, **settings: asked.append((rest, settings))

    monkeypatch.setattr(
        kedge.providers, "entry_points", lambda **_: [Entry("mine"), Entry("practice")]
    )
    connect("mine:model", size=1)
    assert asked == [("model", {"size": 1})]
    assert isinstance(connect("practice"), ResponsesEngine)
