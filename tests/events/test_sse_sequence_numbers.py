"""Sequence numbers: twice, late, never, and not to be believed."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.events.sse import MAX_GAPS, WINDOW_SIZE, SequenceChecker


def check_sequence(*seen: tuple[int, str]) -> list[str]:
    check = SequenceChecker()
    return [check.classify(number, hash(event)) for number, event in seen]


def test_numbers_one_by_one_are_fresh() -> None:
    """The usual stream, wherever it starts."""
    assert check_sequence((0, "a"), (1, "b"), (2, "c")) == ["fresh"] * 3
    assert check_sequence((7, "a"), (8, "b")) == ["fresh"] * 2


def test_the_same_event_again_is_a_duplicate() -> None:
    """At once or later."""
    assert check_sequence((0, "a"), (0, "a"), (1, "b"), (0, "a"))[1::2] == ["duplicate"] * 2


def test_a_jump_is_a_gap_and_what_fills_it_is_late_once() -> None:
    """A late event is news the first time only."""
    seen = [(0, "a"), (4, "e"), (2, "c"), (2, "c"), (1, "b"), (3, "d"), (3, "d"), (5, "f")]
    assert check_sequence(*seen) == [
        "fresh",
        "gap",
        "late",
        "duplicate",
        "late",
        "late",
        "duplicate",
        "fresh",
    ]


def test_events_before_the_first_are_late() -> None:
    """Two events swapped at the very start."""
    assert check_sequence((1, "b"), (0, "a"), (2, "c")) == ["fresh", "late", "fresh"]


def test_one_number_for_two_events_is_not_believed() -> None:
    """From then on every event is fresh."""
    check = SequenceChecker()
    assert check.classify(0, 1) == "fresh"
    assert check.classify(0, 2) == "fresh"
    assert not check.reliable
    assert [check.classify(number, 2) for number in (0, 0, 9, 3)] == ["fresh"] * 4


def test_a_duplicate_from_long_ago_is_still_a_duplicate() -> None:
    """Beyond the window the number alone decides."""
    check = SequenceChecker()
    for number in range(3 * WINDOW_SIZE):
        assert check.classify(number, number) == "fresh"
    assert check.classify(1, 999) == "duplicate"
    assert check.classify(3 * WINDOW_SIZE, 0) == "fresh"


def test_memory_is_bounded_however_wide_and_many_the_gaps() -> None:
    """A hostile server cannot make the check grow."""
    check = SequenceChecker()
    for number in range(0, 10**6, 10**3):
        check.classify(number * 10**12, number)
    assert len(check._gaps) <= MAX_GAPS
    assert len(check._fingerprints) == WINDOW_SIZE


@given(st.permutations(range(8)))
def test_in_any_order_every_event_is_used_once(order: list[int]) -> None:
    """Shuffled and doubled, each number counts exactly once."""
    check = SequenceChecker()
    used = [n for n in [*order, *order] if check.classify(n, n) != "duplicate"]
    assert sorted(used) == list(range(8))
