"""The second law: everything that Kedge says about a request is what was sent."""

import random
from pathlib import Path

import pytest

from law.networks import MemoryNetwork
from law.program_fuzzer import DOORS, ProgramFuzzer
from law.record_fuzzer import WEIGHTED_ENGINES, RecordFuzzer, choose_actions


@pytest.mark.parametrize("kind", WEIGHTED_ENGINES)
async def test_every_place_says_the_same_about_each_request(
    kind: str, tmp_path: Path, network: MemoryNetwork
) -> None:
    """Over a random script, rows, replies, spans, logs, metrics, commands and API agree with the wire."""
    rng = random.Random(kind)
    async with RecordFuzzer(
        rng, str(tmp_path / "store.db"), kinds=[kind], network=network
    ) as fuzzer:
        await fuzzer.run(choose_actions(rng, 8))
    assert not fuzzer.views.differences
    assert fuzzer.stats.requests > 25
    assert fuzzer.stats.plans > 5
    if kind in ("responses", "object", "websocket", "sdk"):
        assert fuzzer.stats.chained > 6
    if kind in ("responses", "object", "sdk"):
        assert fuzzer.stats.background > 0
    if kind in ("responses", "websocket", "sdk"):
        assert fuzzer.stats.healed > 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("behavior", ["honest", "rejects what it stored", "caps the chain"])
async def test_reports_of_chained_clients_and_proxies_agree_with_the_wire(
    door: str, behavior: str, network: MemoryNetwork
) -> None:
    """Report, log record and stored row of each request on the wire have its anchor and sizes, and totals add up."""
    fuzzer = ProgramFuzzer(
        random.Random(1), behavior, door, streaming=door == "proxy", network=network, client="httpx"
    )
    await fuzzer.run(12, edits=True)
    assert not fuzzer.records.differences, fuzzer.records.first_difference
    assert fuzzer.records.requests > 6


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("behavior", ["rejects what it stored", "stores nothing, null echo"])
async def test_both_requests_of_a_healed_exchange_have_a_record(
    behavior: str, door: str, streaming: bool, network: MemoryNetwork
) -> None:
    """A chained request that is rejected, or answered without its context, has a record, as the one after it."""
    fuzzer = ProgramFuzzer(
        random.Random(1), behavior, door, streaming, "always", network=network, client="httpx"
    )
    await fuzzer.run(6)
    assert not fuzzer.records.differences, fuzzer.records.first_difference
    assert fuzzer.records.healed > 0
