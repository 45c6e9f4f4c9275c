"""Long texts of requests and responses are counted in a thread and in bounded time."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from kedge.server.token_counting import MIN_THREAD_CHARS
from kedge.testing import TestServer, serve
from kedge.usage import tokens
from server.conftest import rejects
from server.gated_model import GatedModel

LINE = "All work and no play makes Jack a dull boy, he said. "


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list of counted texts, each with the name of the thread that counted it."""
    calls: list[tuple[str, str]] = []
    count = tokens.get_encoding().encode_ordinary

    def encode_ordinary(text: str) -> list[int]:
        calls.append((text, threading.current_thread().name))
        return count(text)

    recording = SimpleNamespace(encode_ordinary=encode_ordinary)
    monkeypatch.setattr(tokens, "get_encoding", lambda: recording)
    return calls


def send(server: TestServer, api: str, texts: list[str], *, stream: bool) -> None:
    """Send messages to one of the APIs and read the response to its end."""
    messages: Any = [{"role": "user", "content": text} for text in texts]
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client:
        response: Any = (
            client.responses.create(model="practice", input=messages, stream=stream)
            if api == "responses"
            else client.chat.completions.create(model="practice", messages=messages, stream=stream)
        )
        if stream:
            assert list(response)


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_long_texts_are_counted_in_a_thread(
    api: str, stream: bool, counted: list[tuple[str, str]]
) -> None:
    """A long request and its long answer are each counted once, in a thread, and many short texts too."""
    count = MIN_THREAD_CHARS // len(LINE) + 1
    text = f"{api} {stream} {LINE * count}"
    texts = [f"{api} {stream} {n} {LINE}" for n in range(count)]
    with serve(model=GatedModel()) as server:
        send(server, api, [text], stream=stream)
        send(server, api, texts, stream=stream)
    threads = [name for each, name in counted if len(each) >= MIN_THREAD_CHARS]
    assert len(threads) == 2
    threads += [name for each, name in counted if each in texts]
    assert len(threads) > 2
    assert all(name.startswith("kedge-compute") for name in threads)


def test_a_text_over_the_length_limit_is_rejected_uncounted(counted: list[tuple[str, str]]) -> None:
    """A text above the length limit is rejected with the hosted API's message, without counting."""
    with serve() as server, rejects("string_above_max_length") as exc_info:
        send(server, "responses", ["a" * 10_485_761], stream=False)
    assert exc_info.value.param == "input[0].content"
    assert not counted


def test_a_text_over_the_window_is_rejected_after_bounded_work(
    counted: list[tuple[str, str]],
) -> None:
    """Of a text far above the context window, only samples are encoded."""
    with serve() as server, rejects("context_length_exceeded"):
        send(server, "responses", [LINE * (10_000_000 // len(LINE))], stream=False)
    assert sum(len(text) for text, _ in counted) <= tokens.MAX_EXACT_LENGTH
