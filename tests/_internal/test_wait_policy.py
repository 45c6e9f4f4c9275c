"""Tests of the pauses before repetitions."""

from itertools import islice

from kedge._internal.wait_policy import WaitPolicy


def test_pauses_grow_up_to_the_longest() -> None:
    """Each pause is longer by the factor, also after any number of repetitions."""
    policy = WaitPolicy("a question", first=0.5, longest=3.0)
    assert list(islice(policy.pauses(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.pause(10**6) == 3.0


def test_the_first_pause_is_not_longer_than_the_longest() -> None:
    """A caller may set both."""
    assert WaitPolicy("a question", first=5.0, longest=3.0).pause(0) == 3.0


def test_pauses_are_spread_below_their_length() -> None:
    """Clients that failed together return at different times, and none of them later than planned."""
    policy = WaitPolicy("a question", first=4.0, longest=4.0, factor=1, spread=0.25)
    pauses = list(islice(policy.pauses(), 100))
    assert all(3.0 <= pause <= 4.0 for pause in pauses)
    assert len(set(pauses)) > 1


def test_pauses_end_after_a_time() -> None:
    """The last pause is shorter; without time there is none."""
    policy = WaitPolicy("a question", first=1.0, longest=60.0)
    assert list(policy.pauses_within(60)) == [1, 2, 4, 8, 16, 29]
    assert list(policy.pauses_within(0)) == []
