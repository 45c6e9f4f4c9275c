"""The law with stored conversations: forks, edits, failures, concurrent writers and lost context."""

import random
from pathlib import Path

import pytest

from law.conversation_fuzzer import ACTIONS, WEIGHTS, ConversationFuzzer
from law.networks import MemoryNetwork


@pytest.mark.parametrize("seed", range(3))
async def test_context_equals_the_conversation_after_any_script(
    seed: int, tmp_path: Path, network: MemoryNetwork
) -> None:
    """Over a random script, every answer is generated from the conversation's own Turn."""
    rng = random.Random(seed)
    async with ConversationFuzzer(rng, str(tmp_path / "store.db"), network=network) as fuzzer:
        await fuzzer.run(["send", *rng.choices(ACTIONS, WEIGHTS, k=30), "send"])
        assert not await fuzzer.store.verify()
    assert fuzzer.checked_count > 6
    assert fuzzer.chained_count > 3
