"""A limited campaign of the law with conversation objects that several processes continue."""

import random

import pytest

from law.networks import MemoryNetwork
from law.object_fuzzer import ObjectFuzzer


@pytest.mark.parametrize("seed", range(4))
async def test_every_wrong_answer_is_reported(seed: int, network: MemoryNetwork) -> None:
    """Forks, processes, left streams, changed objects and a forgetting server show no wrong answer unreported."""
    stats = await ObjectFuzzer(random.Random(seed), network=network).run(20)
    assert (stats.unreported, stats.repeated) == (0, 0), stats.first_wrong
    assert stats.answers > 10
