"""The memory of a connection: the newest response of each lane, within a size limit."""

from kedge.server.storage.context import EMPTY_CONTEXT, Context, SocketMemory, extend_context


def make_context(size: int, parent: Context = EMPTY_CONTEXT) -> Context:
    """Return a context about this many bytes larger than its parent."""
    return extend_context(parent, [], [], 0, size)


def test_least_recently_used_lane_is_dropped_first() -> None:
    """The size of a context includes its ancestors; the newest response is stored even if it is too large."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(1_000))
    memory.store("b", "resp_2", make_context(1_000, make_context(500)))
    memory.store("a", "resp_3", make_context(1_000))
    memory.store("c", "resp_4", make_context(500))
    assert memory.find("resp_2") is None
    assert memory.find("resp_3")
    assert memory.find("resp_4")
    memory.store("d", "resp_5", make_context(9_000))
    assert memory.find("resp_4") is None
    assert memory.find("resp_5")
    memory.store("d", "resp_6", None)  # the database has it
    assert memory.find("resp_5") is None
    assert len(memory) == 0
