"""The memory of a connection: the newest response of each lane, within its bytes."""

from kedge.server.contexts import NOTHING, Context, grown
from kedge.server.sockets.memory import Memory, Place


def context(size: int, parent: Context = NOTHING) -> Context:
    """A context that takes about this many bytes more than its parent."""
    return grown(parent, [], [], 0, size)


def test_each_lane_remembers_its_newest() -> None:
    """The one before it is gone; other lanes are not touched."""
    memory, first, second = Memory(10_000), context(1), context(1)
    memory.keep("a", "resp_1", first)
    memory.keep("b", "resp_2", second)
    memory.keep("a", "resp_3", first)
    assert memory.find("resp_1") is None
    assert memory.find("resp_2") is second
    assert memory.find("resp_3") is first


def test_the_lane_that_was_quiet_for_longest_is_forgotten_first() -> None:
    """As soon as there is too much, counted with all that a context stands on."""
    memory = Memory(4_500)
    memory.keep("a", "resp_1", context(1_000))
    memory.keep("b", "resp_2", context(1_000, context(500)))
    memory.keep("a", "resp_3", context(1_000))
    memory.keep("c", "resp_4", context(500))
    assert memory.find("resp_2") is None
    assert memory.find("resp_3")
    assert memory.find("resp_4")


def test_the_newest_is_never_too_much() -> None:
    """One response that is larger than the bound stays alone."""
    memory = Memory(100)
    memory.keep("a", "resp_1", context(50))
    memory.keep("b", "resp_2", context(1_000))
    assert memory.find("resp_1") is None
    assert memory.find("resp_2")


def test_only_what_is_named_is_forgotten() -> None:
    """To evict a response that its lane does not remember does nothing."""
    memory = Memory(10_000)
    memory.keep("a", "resp_1", context(1))
    memory.forget("a", "resp_2")
    memory.forget("b", "resp_1")
    assert len(memory) == 1
    memory.forget("a", "resp_1")
    assert len(memory) == 0


def test_a_stored_response_takes_the_place_and_leaves_it_empty() -> None:
    """The lane has moved on, and the database remembers."""
    memory = Memory(10_000)
    place = Place(memory, "a")
    place.keep("resp_1", context(1))
    place.keep("resp_2", None)
    assert place.find("resp_1") is None
    assert len(memory) == 0
