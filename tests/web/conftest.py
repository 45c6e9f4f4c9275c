"""A real page beside a real server, on a real socket, in a thread of its own."""

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
from kedge.server.run import Server, bind
from kedge.server.settings import Limits, Settings
from kedge.web.desk import Desk
from kedge.web.serving import PageSettings, with_page

T = TypeVar("T")
PATIENCE = 60.0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Page:
    """A running page; ``do`` runs something in its loop, with its desk."""

    def __init__(self, settings: Settings, page: PageSettings) -> None:
        self._settings, self._page = settings, page
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults = settings.faults or Faults()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._server: Server | None = None
        self._desk: Desk | None = None
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE)

    async def _serve(self) -> None:
        async with with_page(self._settings, self._page, self.url, self._ready.set) as server:
            app: Any = server.config.app
            self._server, self._desk = server, app.page.state.desk
            await server.serve(sockets=[self._listener])

    def start(self) -> None:
        """Start serving."""
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def stop(self) -> None:
        """Stop serving."""
        self.client.close()
        assert self._server is not None
        self._server.stop()
        self._thread.join(PATIENCE)

    def do(self, work: Callable[[Desk], Awaitable[T]]) -> T:
        """Run something with the desk of the page."""

        async def inside() -> T:
            assert self._desk is not None
            return await work(self._desk)

        assert self._server is not None
        assert self._server.loop is not None
        return asyncio.run_coroutine_threadsafe(inside(), self._server.loop).result(PATIENCE)

    def talk(self, *said: str, title: str = "") -> str:
        """A conversation in which these things were said; its id."""

        async def work(desk: Desk) -> str:
            made = await Conversation.create(
                desk.store, desk.engine, title=title, **dict(desk.settings)
            )
            for each in said:
                await made.send(each)
            return made.id

        return self.do(work)

    def post(self, path: str, **body: Any) -> Any:
        """Post JSON to the API; its answer must be a success."""
        answer = self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        """Read from the API; its answer must be a success."""
        answer = self.client.get(path, params=query)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def running(folder: Path, *, keep_bodies: bool = False, **changes: Any) -> Iterator[Page]:
    """A page for as long as the block lasts."""
    limits = Limits(shutdown_seconds=1.0)
    settings = Settings(limits=limits, faults=Faults(), **changes)
    store = f"sqlite:///{folder / 'kedge.db'}"
    page = Page(settings, PageSettings(store, keep_bodies=keep_bodies, settings={"tools": [add]}))
    page.start()
    try:
        yield page
    finally:
        page.stop()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page for the tests of a module; conversations of other tests are in it."""
    with running(tmp_path_factory.mktemp("page")) as made:
        yield made


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Page]:
    """A page of its own for one test."""
    with running(tmp_path) as made:
        yield made
