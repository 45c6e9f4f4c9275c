"""The law over HTTP: random conversations with random edits, judged on the server's side."""

import random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from law.engine_fuzzer import ACTIONS, TRANSPORTS, EngineFuzzer, FuzzStats, choose_actions


def run_script(actions: list[str], seed: int, world: str = "http") -> FuzzStats:
    """Play a script in a world of its own."""

    async def main() -> FuzzStats:
        async with EngineFuzzer(random.Random(seed), settings=TRANSPORTS[world]) as player:
            await player.run(actions)
            return player.stats

    return anyio.run(main)


@settings(max_examples=18, deadline=None)
@given(
    st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=16),
    st.integers(min_value=0, max_value=2**32),
    st.sampled_from(sorted(TRANSPORTS)),
)
def test_no_script_makes_an_incoherent_request(actions: list[str], seed: int, world: str) -> None:
    """Whatever is done between requests, however they travel, the model sees what the Turn says."""
    tally = run_script(["ask", *actions, "ask"], seed, world)
    assert tally.incoherent == 0, tally.first_incoherent


def test_a_short_campaign_is_coherent_and_uploads_little() -> None:
    """Over a longer script nothing is incoherent, and no more is sent than has to be."""
    rng = random.Random(2026)
    tally = run_script(choose_actions(rng, 150), 7)
    assert tally.incoherent == 0, tally.first_incoherent
    assert tally.requests > 20
    assert tally.sent_bytes <= tally.best_bytes * 1.02
    assert tally.sent_bytes < tally.full_bytes


@pytest.mark.parametrize("world", ["websocket", "websocket, unstored"])
def test_the_same_campaign_over_sockets_is_coherent(world: str) -> None:
    """Also where only a connection remembers, and connections are broken off."""
    rng = random.Random(2026)
    tally = run_script(choose_actions(rng, 150), 7, world)
    assert tally.incoherent == 0, tally.first_incoherent
    assert tally.requests > 20
    assert tally.sent_bytes < tally.full_bytes
