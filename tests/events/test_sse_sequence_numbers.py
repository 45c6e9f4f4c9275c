"""Sequence numbers that are duplicate, late, missing or unreliable."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.events.sse import MAX_GAPS, WINDOW_SIZE, SequenceChecker


def check_sequence(*numbered: tuple[int, str]) -> list[str]:
    check = SequenceChecker()
    return [check.classify(number, hash(event)) for number, event in numbered]


def test_consecutive_numbers_are_fresh() -> None:
    """Consecutive numbers are fresh, starting from any number."""
    assert check_sequence((0, "a"), (1, "b"), (2, "c")) == ["fresh"] * 3
    assert check_sequence((7, "a"), (8, "b")) == ["fresh"] * 2


def test_repeated_event_is_a_duplicate() -> None:
    """The same event with the same number is a duplicate, immediately or later."""
    assert check_sequence((0, "a"), (0, "a"), (1, "b"), (0, "a"))[1::2] == ["duplicate"] * 2


def test_gap_and_late_events() -> None:
    """A skipped number is a gap, and its event is late the first time and then a duplicate."""
    numbered = [(0, "a"), (4, "e"), (2, "c"), (2, "c"), (1, "b"), (3, "d"), (3, "d"), (5, "f")]
    assert check_sequence(*numbered) == [
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
    """An event with a lower number than the first one is late."""
    assert check_sequence((1, "b"), (0, "a"), (2, "c")) == ["fresh", "late", "fresh"]


def test_reused_number_makes_numbers_unreliable() -> None:
    """After two different events with the same number, every event is fresh."""
    check = SequenceChecker()
    assert check.classify(0, 1) == "fresh"
    assert check.classify(0, 2) == "fresh"
    assert not check.reliable
    assert [check.classify(number, 2) for number in (0, 0, 9, 3)] == ["fresh"] * 4


def test_old_duplicate_is_a_duplicate() -> None:
    """An event older than the window is a duplicate by its number alone."""
    check = SequenceChecker()
    for number in range(3 * WINDOW_SIZE):
        assert check.classify(number, number) == "fresh"
    assert check.classify(1, 999) == "duplicate"
    assert check.classify(3 * WINDOW_SIZE, 0) == "fresh"


def test_memory_is_bounded() -> None:
    """Many wide gaps do not increase the memory use beyond a limit."""
    check = SequenceChecker()
    for number in range(0, 10**6, 10**3):
        check.classify(number * 10**12, number)
    assert len(check._gaps) <= MAX_GAPS
    assert len(check._fingerprints) == WINDOW_SIZE


def test_the_newest_gaps_are_retained() -> None:
    """Of more gaps than are stored, late events of the newest are recognized."""
    check = SequenceChecker()
    for number in range(0, 4 * MAX_GAPS, 2):
        check.classify(number, number)
    assert check.classify(4 * MAX_GAPS - 3, 1) == "late"
    assert check.classify(1, 1) != "late"


@given(st.permutations(range(8)))
def test_every_event_is_used_once_in_any_order(order: list[int]) -> None:
    """Each number of a shuffled and duplicated stream is used exactly once."""
    check = SequenceChecker()
    used = [n for n in [*order, *order] if check.classify(n, n) != "duplicate"]
    assert sorted(used) == list(range(8))
