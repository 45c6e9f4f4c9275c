"""The law with stored conversations: forks, edits, failures, concurrent writers and lost context."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

from law.conversation_fuzzer import ACTIONS, WEIGHTS, ConversationFuzzer


@pytest.mark.parametrize("seed", range(3))
def test_context_equals_the_conversation_after_any_script(seed: int) -> None:
    """Over a random script, every answer is generated from the conversation's own Turn."""

    async def main() -> ConversationFuzzer:
        rng = random.Random(seed)
        with TemporaryDirectory() as folder:
            async with ConversationFuzzer(rng, str(Path(folder) / "store.db")) as fuzzer:
                await fuzzer.run(["send", *rng.choices(ACTIONS, WEIGHTS, k=30), "send"])
                assert not await fuzzer.store.verify()
                return fuzzer

    fuzzer = anyio.run(main)
    assert fuzzer.checked_count > 6
    assert fuzzer.chained_count > 3
