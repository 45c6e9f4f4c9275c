"""The memory of a connection: the newest response of each lane, within a size limit."""

from kedge.server.storage.context import EMPTY_CONTEXT, Context, SocketMemory, extend_context


def make_context(size: int, parent: Context = EMPTY_CONTEXT) -> Context:
    """Return a context about this many bytes larger than its parent."""
    return extend_context(parent, [], [], 0, size)


def test_least_recently_used_lane_is_dropped_first() -> None:
    """Above the limit, the least recently used lane is dropped; a context's size includes its ancestors."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(1_000))
    memory.store("b", "resp_2", make_context(1_000, make_context(500)))
    memory.store("a", "resp_3", make_context(1_000))
    memory.store("c", "resp_4", make_context(500))
    assert memory.find("resp_2") is None
    assert memory.find("resp_3")
    assert memory.find("resp_4")


def test_newest_response_is_always_stored() -> None:
    """A response larger than the limit is stored alone."""
    memory = SocketMemory(100)
    memory.store("a", "resp_1", make_context(50))
    memory.store("b", "resp_2", make_context(1_000))
    assert memory.find("resp_1") is None
    assert memory.find("resp_2")


def test_stored_response_clears_its_lane() -> None:
    """A stored response removes the previous one of its lane, because the database has it."""
    memory = SocketMemory(10_000)
    memory.store("a", "resp_1", make_context(1))
    memory.store("a", "resp_2", None)
    assert memory.find("resp_1") is None
    assert len(memory) == 0
