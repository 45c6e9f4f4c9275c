"""Tests of operations that insert a row unless it exists, by several tasks and connections at the same time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kedge import Conversation, assistant, user
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import Store, open_store, response_index
from kedge.store.token_registry import TokenRegistry
from kedge.workflows import Step, steps
from postgresql import create_schema
from store.sample_conversations import create_conversation

CALLS = 12
Operation = Callable[[Store, int], Awaitable[Any]]


@pytest.fixture
async def stores(lasting_url: str) -> AsyncIterator[Sequence[Store]]:
    """Yield one store, opened several times like by several processes."""
    opened = [await open_store(lasting_url) for _ in range(3)]
    yield opened
    for store in opened:
        await store.aclose()


async def call_together(stores: Sequence[Store], operation: Operation) -> list[Any]:
    """Call an operation many times at once, and return all results and errors."""
    calls = (operation(stores[number % len(stores)], number) for number in range(CALLS))
    return await asyncio.gather(*calls, return_exceptions=True)


def get_errors(results: Sequence[Any]) -> list[BaseException]:
    """Return the errors among some results."""
    return [each for each in results if isinstance(each, BaseException)]


async def test_exports_are_imported_in_different_orders(stores: Sequence[Store]) -> None:
    """All imports of the same conversations succeed: those that come first have the exported ids."""
    rows = [(await create_conversation(stores[0], title=title))[0] for title in ("one", "two")]
    texts = [await stores[0].export(row) for row in rows]
    for row in rows:
        await stores[0].delete(row)
    results = await call_together(
        stores, lambda store, number: store.import_("\n".join(texts[:: 1 if number % 2 else -1]))
    )
    assert get_errors(results) == []
    ids = {imported.id for pair in results for imported in pair}
    assert len(ids) == 2 * CALLS
    assert {row.id for row in rows} <= ids
    assert await stores[0].verify() == []


async def test_titled_conversation_is_created_once(stores: Sequence[Store]) -> None:
    """All callers of `create_titled` get the same conversation, and one of them has created it."""
    for title in ("one", "two", "three"):
        results = await call_together(
            stores, lambda store, _, title=title: store.create_titled(title, data={"kept": True})
        )
        assert get_errors(results) == []
        assert len({row.id for row, _ in results}) == 1
        assert [is_new for _, is_new in results].count(True) == 1
    assert len(await stores[0].conversations()) == 3


async def fork_same(store: Store, number: int) -> None:
    """Fork the same conversation."""
    row = await store.conversation("shared")
    await store.fork(row, row.head, str(number))


ALL_SUCCEED: dict[str, Operation] = {
    "create with equal blocks": lambda store, number: store.create(
        blocks=[user("shared"), assistant("text")][:: 1 if number % 2 else -1]
    ),
    "create many": lambda store, number: store.create_all(
        [[user("first")], [user("second")]][:: 1 if number % 2 else -1]
    ),
    "open or create": lambda store, _: Conversation(
        "practice", store=store, id="same", blocks="Hello"
    ).rename("Renamed"),
    "append equal blocks": lambda store, _: append_same(store),
    "replace tags": lambda store, number: store.update("shared", tags=["a", "b", str(number)]),
    "fork": fork_same,
    "search": lambda store, _: store.search("question"),
    "claim": lambda store, number: claim_same(store, str(number)),
    "evidence": lambda store, _: store.save_evidence("key", {"known": True}),
    "claim object": lambda store, number: store.claim_object(
        "scope", "object", "", owner=str(number)
    ),
    "count": lambda store, _: TokenRegistry(store).count("alice", requests=1),
    "start session": lambda store, _: TokenRegistry(store).start_session("alice", 60),
    "end session": lambda store, _: TokenRegistry(store).end_session("secret", 60),
    "scope key": lambda store, _: store.database.write(response_index.get_scope_key),
    "gc": lambda store, _: store.gc(),
    "workflow": lambda store, _: steps(
        [Step("one", "Say one"), Step("two", "Say two")],
        store=store,
        engine="practice",
        workflow="wf_same",
    ),
}


async def append_same(store: Store) -> None:
    """Append the same blocks to the head, whichever node that is."""
    row = await store.conversation("shared")
    loaded = await store.load(row)
    await store.append(row, loaded.node, [user("equal"), assistant("blocks")])


async def claim_same(store: Store, owner: str) -> None:
    """Claim the same turn."""
    row = await store.conversation("shared")
    await store.claim(row, "key", request_hash=b"hash", owner=owner, lease=60.0)


@pytest.mark.parametrize("name", ALL_SUCCEED)
async def test_simultaneous_calls_all_succeed(stores: Sequence[Store], name: str) -> None:
    """No call fails because another one inserted the same row first."""
    await create_conversation(stores[0], id="shared")
    results = await call_together(stores, ALL_SUCCEED[name])
    assert get_errors(results) == []
    assert await stores[0].verify() == []


ONE_SUCCEEDS: dict[str, tuple[Operation, type[Exception]]] = {
    "create with an id": (lambda store, _: store.create(id="same"), InvalidSetting),
    "add a token": (lambda store, _: TokenRegistry(store).add("bob"), InvalidSetting),
    "revoke a token": (lambda store, _: TokenRegistry(store).revoke("alice"), NotInStore),
    "delete": (lambda store, _: store.delete("shared"), NotInStore),
}


@pytest.mark.parametrize("name", ONE_SUCCEEDS)
async def test_one_of_simultaneous_calls_succeeds(stores: Sequence[Store], name: str) -> None:
    """One call succeeds, and every other one fails with the error for a row that exists or is missing."""
    operation, error = ONE_SUCCEEDS[name]
    await create_conversation(stores[0], id="shared")
    await TokenRegistry(stores[0]).add("alice")
    errors = get_errors(await call_together(stores, operation))
    assert [type(each) for each in errors] == [error] * (CALLS - 1)


async def test_simultaneous_tags_are_all_retained(stores: Sequence[Store]) -> None:
    """Tags that are added at the same time do not replace each other."""
    row, _ = await create_conversation(stores[0])
    results = await call_together(
        stores,
        lambda store, number: store.update_with(
            row.id, lambda row: {"tags": (*row.tags, f"tag{number}")}
        ),
    )
    assert get_errors(results) == []
    tags = (await stores[0].conversation(row.id)).tags
    assert set(tags) == {f"tag{number}" for number in range(CALLS)}


async def test_empty_database_is_opened_by_many(postgres_url: str, tmp_path: Path) -> None:
    """Several processes that open an empty database create its tables once."""
    with create_schema(postgres_url) as schema:
        for url in (schema, f"sqlite:///{tmp_path}/new.db"):
            opened = await asyncio.gather(*(open_store(url) for _ in range(CALLS)))
            for store in opened:
                assert await store.conversations() == []
                await store.aclose()
