"""The row of a deleted conversation is rejected, even when a new conversation has the same id."""

import pytest

from kedge import user
from kedge.errors import NotInStore
from kedge.store import Store
from store.row_calls import ROW_CALLS, TELEMETRY
from store.sample_conversations import count_rows, create_conversation


async def test_no_method_accepts_row_of_deleted_conversation(store: Store) -> None:
    """Each method raises `NotInStore`, and a new conversation with the same id is unchanged."""
    row, nodes = await create_conversation(store, 2, id="mine")
    await store.claim(row, "k", request_hash=b"x", owner="a", lease=9.0)
    await store.delete(row.id)
    other, others = await create_conversation(store, 2, id="mine", title="Another")
    assert other.number > row.number
    assert not {node.id for node in nodes} & {node.id for node in others}
    before = await store.export(other)
    accepted: list[str] = []
    for name, call in ROW_CALLS.items():
        try:
            await call(store, row, nodes[-1])
        except NotInStore:
            continue
        accepted.append(name)
    assert accepted == []
    assert await store.export(other) == before
    assert (await store.claim(other, "k", request_hash=b"y", owner="b", lease=9.0)).is_owner
    assert await store.verify() == []


async def test_deleted_node_of_original_is_rejected(store: Store) -> None:
    """A fork cannot continue from nodes or blocks that were deleted with the original conversation."""
    row, nodes = await create_conversation(store, 4)
    fork = await store.fork(row, nodes[1].id)
    await store.append(fork, nodes[2], [user("elsewhere")], kept=3, head=nodes[1].id)
    await store.note(fork, nodes[4].id, TELEMETRY)
    await store.claim(fork, "k", request_hash=b"x", owner="a", lease=9.0)
    await store.settle(fork, "k", nodes[4].id)
    await store.delete(row)
    for node in (nodes[2], nodes[4]):
        with pytest.raises(NotInStore):
            await store.append(fork, node, [user("too late")])
    with pytest.raises(NotInStore):
        await store.fork(fork, nodes[4].id)
    assert await count_rows(store, "incidents", "claims") == [0, 0]
    assert await store.verify() == []
