"""Long texts are counted beside the loop, on the way in and on the way out."""

import threading
from typing import Any

import pytest
from openai import OpenAI

from kedge.server.token_counting import MIN_THREAD_CHARS
from kedge.testing import TestServer, serve
from kedge.tokens import counter
from server.gated_model import GatedModel

LINE = "All work and no play makes Jack a dull boy, he said. "


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads in which long texts are counted."""
    found: list[str] = []
    really: Any = counter._count_uncached  # pyright: ignore[reportPrivateUsage]

    def noting(text: str) -> int:
        if len(text) >= MIN_THREAD_CHARS:
            found.append(threading.current_thread().name)
        return really(text)

    monkeypatch.setattr(counter, "_count_uncached", noting)
    return found


def send_text(server: TestServer, api: str, text: str, *, stream: bool) -> None:
    """Say a text over one of the APIs, and read the answer to its end."""
    client = OpenAI(base_url=server.base_url, api_key="any", max_retries=0)
    given: Any = (
        client.responses.create(model="practice", input=text, stream=stream)
        if api == "responses"
        else client.chat.completions.create(
            model="practice", messages=[{"role": "user", "content": text}], stream=stream
        )
    )
    if stream:
        assert list(given)
    client.close()


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_counts_no_long_text(api: str, stream: bool, threads: list[str]) -> None:
    """Neither the question nor the answer, which repeats it; each is counted once, in a thread."""
    text = f"{api} {stream} " + LINE * (MIN_THREAD_CHARS // len(LINE) + 1)
    with serve(model=GatedModel()) as server:
        send_text(server, api, text, stream=stream)
    assert len(threads) == 2
    assert all(name.startswith("asyncio_") for name in threads)
