"""A limited campaign of the law with servers whose memory misbehaves."""

import random

import pytest

from law.memory_fuzzer import BEHAVIORS, LATE_BEHAVIORS, TRANSPORTS, MemoryFuzzer

CAPPED = {"caps the chain", "caps the chain early"}


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("behavior", sorted(BEHAVIORS))
async def test_no_behavior_shows_a_wrong_answer(behavior: str, transport: str) -> None:
    """A capped chain may show one flagged wrong answer when streaming; other behaviors show none."""
    rng = random.Random(f"{behavior}/{transport}")
    stats = await MemoryFuzzer(rng, behavior, transport).run(10)
    allowed = 1 if behavior in CAPPED and transport != "whole" else 0
    assert stats.wrong <= allowed, stats.first_wrong
    assert stats.flagged == stats.wrong
    assert stats.answers == 10


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_reliable_server_of_unknown_kind_is_chained_on(transport: str) -> None:
    """Requests to a reliable server of an unknown kind are chained after it was verified."""
    stats = await MemoryFuzzer(random.Random(5), "honest", transport).run(14)
    assert (stats.wrong, stats.healed) == (0, 0)
    assert stats.chained >= 8


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize("late", LATE_BEHAVIORS)
async def test_server_that_starts_to_forget_shows_one_flagged_answer(
    late: str, transport: str
) -> None:
    """A server that starts to forget shows at most the answer being streamed, and it is flagged."""
    stats = await MemoryFuzzer(random.Random(late), "honest", transport).run(14, late=late)
    assert stats.wrong <= (0 if transport == "whole" else 1), stats.first_wrong
    assert stats.flagged == stats.wrong
