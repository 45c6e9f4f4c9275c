"""The second law: everything that Kedge says about a request is what was sent."""

import random
from pathlib import Path

import pytest

from law.program_fuzzer import DOORS, ProgramFuzzer
from law.record_fuzzer import RecordFuzzer, choose_actions


@pytest.mark.parametrize("seed", [1, 4, 7, 8])
async def test_every_place_says_the_same_about_each_request(seed: int, tmp_path: Path) -> None:
    """Over a random script, rows, replies, spans, logs, metrics, commands and API agree with the wire."""
    rng = random.Random(seed)
    async with RecordFuzzer(rng, str(tmp_path / "store.db")) as fuzzer:
        await fuzzer.run(choose_actions(rng, 25))
    assert not fuzzer.views.differences
    assert fuzzer.stats.requests > 15
    assert fuzzer.stats.chained > 3
    assert fuzzer.stats.plans > 3


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("behavior", ["honest", "rejects what it stored", "caps the chain"])
def test_reports_of_chained_clients_and_proxies_agree_with_the_wire(
    door: str, behavior: str
) -> None:
    """The record of each request of a program has the anchor and the sizes of the body that was answered."""
    fuzzer = ProgramFuzzer(random.Random(1), behavior, door, streaming=door == "proxy")
    fuzzer.run(12, edits=True)
    assert not fuzzer.records.differences, fuzzer.records.first_difference
    assert fuzzer.records.requests > 6
