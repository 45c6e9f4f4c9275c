"""Fixtures that run a page and its server on a real socket, in a separate thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from kedge.conversation import Conversation
from kedge.server.faults import Faults
from kedge.server.settings import Limits, Settings
from kedge.server.uvicorn_server import UvicornServer, bind
from kedge.web.app import PageSettings, open_page_server
from kedge.web.service import ConversationService
from server.gated_model import GatedModel

T = TypeVar("T")
TIMEOUT = 300.0
LIMITS = Limits(shutdown_seconds=1.0)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class PageServer:
    """A running page; ``run`` executes a function in its event loop with its service."""

    def __init__(self, settings: Settings, page: PageSettings, port: int = 0) -> None:
        self._settings, self._page = settings, page
        self._listener = bind("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults = settings.faults or Faults()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._server: UvicornServer | None = None
        self._service: ConversationService | None = None
        self.client = httpx2.Client(base_url=self.url, timeout=TIMEOUT)

    async def _serve(self) -> None:
        async with open_page_server(
            self._settings, self._page, self.url, self._ready.set
        ) as server:
            app: Any = server.config.app
            self._server, self._service = server, app.page.state.services.get(None)
            await server.serve(sockets=[self._listener])

    def start(self) -> None:
        """Start serving."""
        self._thread.start()
        assert self._ready.wait(TIMEOUT)

    def stop(self) -> None:
        """Stop serving."""
        self.client.close()
        assert self._server is not None
        self._server.stop()
        self._thread.join(TIMEOUT)

    def run(self, work: Callable[[ConversationService], Awaitable[T]]) -> T:
        """Run a function with the page's service and return its result."""

        async def call() -> T:
            assert self._service is not None
            return await work(self._service)

        assert self._server is not None
        assert self._server.loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self._server.loop).result(TIMEOUT)

    def create_conversation(self, *messages: str, **members: Any) -> str:
        """Create a conversation with these members, send messages in it and return its id."""

        async def work(service: ConversationService) -> str:
            conversation = await Conversation.create(
                service.models.engine, store=service.store, **dict(service.settings) | members
            )
            for each in messages:
                await conversation.send(each)
            return conversation.id

        return self.run(work)

    def post(self, path: str, **body: Any) -> Any:
        """Post JSON to the API, check that it succeeded and return the JSON response."""
        answer = self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        """Get JSON from the API, check that it succeeded and return it."""
        answer = self.client.get(path, params=query)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def serve_page(
    folder: Path,
    *,
    keep_bodies: bool = False,
    port: int = 0,
    limits: Limits = LIMITS,
    **changes: Any,
) -> Iterator[PageServer]:
    """Yield a page that runs until the block ends."""
    settings = Settings(limits=limits, faults=Faults(), **changes)
    store = f"sqlite:///{folder / 'kedge.db'}"
    page = PageServer(
        settings, PageSettings(store, keep_bodies=keep_bodies, settings={"tools": [add]}), port
    )
    page.start()
    try:
        yield page
    finally:
        page.stop()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Yield a page shared by the tests of a module, including their conversations."""
    with serve_page(tmp_path_factory.mktemp("page")) as server:
        yield server


@pytest.fixture
def empty_page(tmp_path: Path) -> Iterator[PageServer]:
    """Yield a separate page for one test."""
    with serve_page(tmp_path) as server:
        yield server


@pytest.fixture
def gate() -> GatedModel:
    """Return a model that pauses after its first text for a message that starts with "wait"."""
    return GatedModel()


@pytest.fixture
def gated(tmp_path: Path, gate: GatedModel) -> Iterator[PageServer]:
    """Yield a page with the gated model."""
    with serve_page(tmp_path, model=gate) as server:
        yield server
