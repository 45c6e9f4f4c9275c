"""The memory of a connection: the newest response of each lane, within its bytes."""

from kedge.server.storage.context import EMPTY_CONTEXT, Context, extend_context
from kedge.server.websocket.memory import LaneMemory, SocketMemory


def make_context(size: int, parent: Context = EMPTY_CONTEXT) -> Context:
    """A context that takes about this many bytes more than its parent."""
    return extend_context(parent, [], [], 0, size)


def test_each_lane_remembers_its_newest() -> None:
    """The one before it is gone; other lanes are not touched."""
    memory, first, second = SocketMemory(10_000), make_context(1), make_context(1)
    memory.store("a", "resp_1", first)
    memory.store("b", "resp_2", second)
    memory.store("a", "resp_3", first)
    assert memory.find("resp_1") is None
    assert memory.find("resp_2") is second
    assert memory.find("resp_3") is first


def test_the_lane_that_was_quiet_for_longest_is_forgotten_first() -> None:
    """As soon as there is too much, counted with all that a context stands on."""
    memory = SocketMemory(4_500)
    memory.store("a", "resp_1", make_context(1_000))
    memory.store("b", "resp_2", make_context(1_000, make_context(500)))
    memory.store("a", "resp_3", make_context(1_000))
    memory.store("c", "resp_4", make_context(500))
    assert memory.find("resp_2") is None
    assert memory.find("resp_3")
    assert memory.find("resp_4")


def test_the_newest_is_never_too_much() -> None:
    """One response that is larger than the bound stays alone."""
    memory = SocketMemory(100)
    memory.store("a", "resp_1", make_context(50))
    memory.store("b", "resp_2", make_context(1_000))
    assert memory.find("resp_1") is None
    assert memory.find("resp_2")


def test_only_what_is_named_is_forgotten() -> None:
    """To evict a response that its lane does not remember does nothing."""
    memory = SocketMemory(10_000)
    memory.store("a", "resp_1", make_context(1))
    memory.forget("a", "resp_2")
    memory.forget("b", "resp_1")
    assert len(memory) == 1
    memory.forget("a", "resp_1")
    assert len(memory) == 0


def test_a_stored_response_takes_the_place_and_leaves_it_empty() -> None:
    """The lane has moved on, and the database remembers."""
    memory = SocketMemory(10_000)
    place = LaneMemory(memory, "a")
    place.store("resp_1", make_context(1))
    place.store("resp_2", None)
    assert place.find("resp_1") is None
    assert len(memory) == 0
