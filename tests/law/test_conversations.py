"""The law through conversations: forks, edits, crashes, other hands, and a server that forgets."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

from law.talker import ACTIONS, WEIGHTS, Talker


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_a_conversation_the_model_sees_what_it_says(seed: int) -> None:
    """Over a random script no answer is given to anything but the conversation's own Turn."""

    async def main() -> Talker:
        rng = random.Random(seed)
        with TemporaryDirectory() as folder:
            async with Talker(rng, str(Path(folder) / "store.db")) as talker:
                await talker.play(["send", *rng.choices(ACTIONS, WEIGHTS, k=30), "send"])
                assert not await talker.store.verify()
                return talker

    talker = anyio.run(main)
    assert talker.judged > 6
    assert talker.chained > 3
