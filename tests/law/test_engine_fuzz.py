"""The law over HTTP: random conversations with random edits, checked on the server's side."""

import random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from law.engine_fuzzer import ACTIONS, TRANSPORTS, EngineFuzzer, FuzzStats, choose_actions
from law.networks import MemoryNetwork


def run_script(actions: list[str], seed: int, transport: str = "http") -> FuzzStats:
    """Run a script against new servers in memory, and return the statistics."""

    async def main() -> FuzzStats:
        network, settings = MemoryNetwork(), TRANSPORTS[transport]
        with network.install():
            fuzzer = EngineFuzzer(random.Random(seed), settings=settings, network=network)
            async with fuzzer as player:
                await player.run(actions)
                return player.stats

    return anyio.run(main)


@settings(max_examples=18, deadline=None)
@given(
    st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=16),
    st.integers(min_value=0, max_value=2**32),
    st.sampled_from(sorted(TRANSPORTS)),
)
def test_no_script_makes_an_incoherent_request(
    actions: list[str], seed: int, transport: str
) -> None:
    """After any edits and over any transport, the model's context equals the Turn."""
    tally = run_script(["ask", *actions, "ask"], seed, transport)
    assert tally.incoherent == 0, tally.first_incoherent
    assert tally.stale_reasoning == 0


def test_short_campaign_is_coherent_and_sends_little() -> None:
    """A longer script is coherent and sends at most 2 % more bytes than the best plan."""
    rng = random.Random(2026)
    tally = run_script(choose_actions(rng, 150), 7)
    assert tally.incoherent == 0, tally.first_incoherent
    assert tally.stale_reasoning == 0
    assert tally.requests > 20
    assert tally.sent_bytes <= tally.best_bytes * 1.02
    assert tally.sent_bytes < tally.full_bytes


@pytest.mark.parametrize("seed", range(3))
def test_every_rendered_member_is_covered(seed: int) -> None:
    """After edits of roles, names, phases, namespaces, callers and details, every request is coherent."""
    tally = run_script(["ask", "ask", "edit_member", "ask", "edit_member"] * 6, seed)
    assert tally.incoherent == 0, tally.first_incoherent
    assert tally.sent_bytes < tally.full_bytes


def test_reasoning_is_sent_again_only_with_its_context() -> None:
    """Full sends, of stateless requests and after losses, have reasoning, but none of an edited context."""
    script = ["ask", "ask", "ask stateless", "edit", "ask", "ask unstored", "forget", "ask"] * 6
    tallies = [run_script(script, seed) for seed in range(3)]
    assert sum(tally.reasoning for tally in tallies) > 0
    assert sum(tally.stale_reasoning for tally in tallies) == 0
