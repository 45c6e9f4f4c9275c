"""The second law: everything that Kedge says about a request is what was sent."""

import random
from pathlib import Path

import pytest

from law.record_fuzzer import RecordFuzzer, choose_actions


@pytest.mark.parametrize("seed", range(4))
async def test_every_place_says_the_same_about_each_request(seed: int, tmp_path: Path) -> None:
    """Over a random script, rows, replies, spans, logs, metrics, commands and API agree with the wire."""
    rng = random.Random(seed)
    async with RecordFuzzer(rng, str(tmp_path / "store.db")) as fuzzer:
        await fuzzer.run(choose_actions(rng, 25))
    assert not fuzzer.views.differences
    assert fuzzer.stats.requests > 15
    assert fuzzer.stats.chained > 3
    assert fuzzer.stats.plans > 3
