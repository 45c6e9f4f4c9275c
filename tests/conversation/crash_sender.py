"""Processes that continue a conversation until they are killed, for the fault tests.

    python crash_sender.py STORE SERVER KILLS SEED

One process after the other is forked and killed with SIGKILL at a random moment of a request. The next one
opens the conversation and continues with the pending question, or with the next one. At the end, every
question is stored once and in order, and every answer had the complete context before it.
"""

import asyncio
import os
import random
import re
import signal
import sys
import time

from kedge import Conversation, Turn, connect, open_store, user
from kedge.turns import AssistantBlock, UserBlock


async def continue_conversation(url: str, server: str, name: str, out: int) -> None:
    """Send lines until killed, and report each answer."""
    async with open_store(url) as store, connect(f"responses:{server}#practice") as engine:
        conversation = await Conversation.open(engine, store=store, id=name)
        if await conversation.pending():
            await conversation.resume()
        while True:
            number = sum(isinstance(block, UserBlock) for block in conversation.turn.blocks)
            await conversation.send(f"Line {number}", streaming=number % 2 == 0)
            os.write(out, f"{number}\n".encode())


def kill_sender(url: str, server: str, name: str, rng: random.Random) -> int:
    """Kill a process at a random moment, and return the number of answers it reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        asyncio.run(continue_conversation(url, server, name, writing))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        answers = [lines.readline() for _ in range(rng.randint(0, 3))]
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        answers += lines.readlines()
    os.waitpid(child, 0)
    return len(answers)


async def create_conversation(url: str, server: str) -> str:
    """Create the conversation; the request loads modules that all processes need."""
    async with open_store(url) as store, connect(f"responses:{server}#practice") as engine:
        await engine.run(Turn([user("Hello")]))
        return (await store.create("Killed")).id


async def check_conversation(url: str, server: str, name: str, reported: int) -> int:
    """Answer a pending question, check that each question is stored once, and return their number."""
    async with open_store(url) as store, connect(f"responses:{server}#practice") as engine:
        assert await store.verify() == []
        conversation = await Conversation.open(engine, store=store, id=name)
        if await conversation.pending():
            await conversation.resume()
        blocks = conversation.turn.blocks
        questions = [block.text for block in blocks if isinstance(block, UserBlock)]
        assert questions == [f"Line {number}" for number in range(len(questions))]
        assert len(questions) >= reported
        answers = [block.text for block in blocks if isinstance(block, AssistantBlock)]
        counts = [int(re.findall(r"I can see (\d+) message", text)[-1]) for text in answers]
        assert counts == list(range(1, 2 * len(questions), 2)), answers
        return len(questions)


def main(url: str, server: str, kills: int, seed: int) -> None:
    """Kill processes one after the other, and check the conversation."""
    rng = random.Random(seed)
    name = asyncio.run(create_conversation(url, server))
    reported = sum(kill_sender(url, server, name, rng) for _ in range(kills))
    questions = asyncio.run(check_conversation(url, server, name, reported))
    sys.stdout.write(f"{kills} {questions}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
