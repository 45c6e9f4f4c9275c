"""Functions of a transaction that are bound as methods of `Store`."""

import inspect

from for_each import for_each
from kedge.store import Store
from kedge.store.store import SyncStore

METHODS = {
    f"{facade.__name__}.{name}": method
    for facade in (Store, SyncStore)
    for name, method in inspect.getmembers(facade, inspect.isfunction)
    if not name.startswith("_")
}


@for_each("name", METHODS)
def test_methods_hide_their_transaction(name: str) -> None:
    """Every method begins with its store, has a docstring, and names no transaction in either."""
    signature = inspect.signature(METHODS[name])
    assert "tx" not in signature.parameters
    assert next(iter(signature.parameters)) in ("self", "facade")
    text = inspect.getdoc(METHODS[name])
    assert text
    assert "tx:" not in text


async def test_bound_methods_use_the_clock_of_the_store(store: Store) -> None:
    """A method records the time of its store's clock, not that of the machine."""
    row = await store.create("before")
    store.clock = lambda: 123.0
    assert (await store.update(row, title="after")).updated_at == 123.0
    assert (await store.fork(row, row.head)).created_at == 123.0
