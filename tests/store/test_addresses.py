"""Every function of a store accepts its address or the path of its file, and closes what it opened."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge import Conversation, InvalidSetting, Turn, chain, connect, open_store, unchain, user
from kedge.analytics import analyze, analyze_conversations, analyze_over_time
from kedge.chaining import StoreIndex
from kedge.chaining.proxy import create_proxy_app
from kedge.conversation import find_anchors, with_stored_anchors
from kedge.store import TokenRegistry
from kedge.workflows import Side, Step, debate, list_workflows, load_workflow, refine, steps

Place = Any
"""A store, an address or a path."""
SIDES = [Side("tea", "practice"), Side("coffee", "practice")]
TURN = Turn([user("My ship is the Argo.")])


def is_open(file: Path) -> bool:
    """Return whether a connection to the database is open: the last one that is closed deletes the log."""
    return Path(f"{file}-wal").exists()


async def add_token(place: Place) -> str:
    """Add a token and return its name."""
    async with TokenRegistry(place) as registry:
        return (await registry.add("alice"))[0].name


async def run_workflows(place: Place) -> list[str]:
    """Run one workflow of each kind, and return the status of each as it is loaded."""
    await refine("Hi", judge=lambda _: True, store=place, engine="practice", workflow="refine")
    await debate("?", SIDES, judge=lambda _: "tea", store=place, rounds=1, workflow="debate")
    await steps([Step("a", "Hi")], store=place, engine="practice", workflow="steps")
    listed = await list_workflows(place)
    return sorted([(await load_workflow(place, each.id)).status for each in listed])


async def plan_with_anchors(place: Place) -> int:
    """Send a Turn through an engine that finds anchors in the store, and return the requests that it has stored."""
    async with with_stored_anchors(place)(connect("practice")) as engine:
        await engine.run(TURN)
    return len(await find_anchors(place, TURN, "practice"))


async def count_responses(place: Place) -> list[int]:
    """Return the number of conversations and of requests, as three functions count them."""
    buckets = await analyze_over_time(place, buckets=1)
    conversations = await analyze_conversations(place)
    totals = (await analyze(place)).requests.total
    return [len(buckets), len(conversations), totals]


async def copy_conversation(place: Place) -> list[str]:
    """Import a conversation from another store, and return the titles that are listed and the texts that are found."""
    async with Conversation("practice", title="A ship") as conversation:
        await conversation.append(*TURN.blocks)
        await Conversation.import_(place, await conversation.export())
    titles = [row.title for row in await Conversation.list(place)]
    return [*titles, *(hit.excerpt for hit in await Conversation.search(place, "Argo"))]


async def serve_proxy(place: Place) -> int:
    """Start and end a proxy, and return the status of a request."""
    app = create_proxy_app("http://127.0.0.1:9/v1", store=place)
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/healthz")).status_code


async def use_index(place: Place) -> int:
    """Chain a client on the responses of a store, and open an index of it."""
    async with httpx2.AsyncClient() as http:
        unchain(chain(http, store=place))
    index = StoreIndex(place)
    index.close()
    return len(index.hash_key)


USES: list[tuple[Callable[[Place], Awaitable[object]], object]] = [
    (add_token, "alice"),
    (run_workflows, ["decided", "finished", "passed"]),
    (plan_with_anchors, 0),
    (count_responses, [0, 0, 0]),
    (copy_conversation, ["A ship", "My ship is the Argo."]),
    (serve_proxy, 200),
    (use_index, 32),
]


@pytest.mark.parametrize("kind", ["path", "text", "url"])
async def test_functions_accept_an_address_and_close_the_store(kind: str, tmp_path: Path) -> None:
    """A path, its text and a URL are accepted in place of a store; afterwards nothing has the database open."""
    for number, (use, expected) in enumerate(USES):
        file = tmp_path / f"{number}.db"
        place = {"path": file, "text": str(file), "url": f"sqlite:///{file}"}[kind]
        assert await use(place) == expected
        assert file.exists()
        assert not is_open(file)


async def test_functions_accept_the_address_of_a_database_server(empty_schema: str) -> None:
    """The address of a PostgreSQL database is accepted; each use finds what the earlier ones stored."""
    await copy_conversation(empty_schema)
    await count_responses(empty_schema)
    assert await add_token(empty_schema) == "alice"
    assert await run_workflows(empty_schema) == ["decided", "finished", "passed"]
    assert await use_index(empty_schema) == 32
    assert "A ship" in [row.title for row in await Conversation.list(empty_schema)]


async def test_functions_leave_a_store_of_the_caller_open(tmp_path: Path) -> None:
    """A store that is passed remains open, and has what the functions have stored."""
    for number, (use, expected) in enumerate(USES):
        async with open_store(tmp_path / f"{number}.db") as store:
            assert await use(store) == expected
            assert isinstance(await store.conversations(), list | tuple)


async def test_address_of_an_open_store_is_that_store(tmp_path: Path) -> None:
    """A function with the address of a conversation's store sees its newest messages and leaves it open."""
    file = tmp_path / "m.db"
    async with Conversation("practice", store=file, id="ada") as conversation:
        await conversation.send("My ship is the Argo.")
        assert [row.id for row in await Conversation.list(file)] == ["ada"]
        assert (await analyze(file)).requests.total == 1
        await add_token(file)
        await conversation.send("What is my ship?")
        assert is_open(file)
    assert not is_open(file)


@for_each("place", [5, None, ["m.db"], b"m.db"])
async def test_other_values_are_rejected(place: Any) -> None:
    """What is neither a store nor an address is named, before anything is opened."""
    uses: list[Callable[[Place], Awaitable[object]]] = [
        Conversation.list,
        lambda value: Conversation.search(value, "Argo"),
        lambda value: Conversation.import_(value, ""),
        analyze,
        list_workflows,
        lambda value: load_workflow(value, "wf"),
        add_token,
    ]
    for use in uses:
        with pytest.raises(
            InvalidSetting,
            match=r"store must be (Store or str or PathLike|a Store, an address or the path)",
        ):
            await use(place)
