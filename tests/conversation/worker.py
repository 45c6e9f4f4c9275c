"""Processes that work on the same conversations.

    python worker.py STORE SERVER PROCESSES ITEMS SHARED CONVERSATION...

Each sends every item in every conversation until it is on the path of the head, and sends one shared
message with the same key as the others. Each process prints the number of its conflicts in one line.
"""

import asyncio
import multiprocessing
import sys
from importlib import import_module

from kedge import Conversation, HeadConflict, connect, open_store
from kedge.tokens import get_encoding


async def send_items(
    url: str, server: str, name: str, items: int, shared: str, conversations: list[str]
) -> None:
    """Send all items, and print the number of conflicts."""
    lost = 0
    engine = connect(f"responses:{server}#practice")
    async with open_store(url) as store, engine:
        common = await Conversation.open(engine, store=store, id=shared, lease=300)
        reply = await common.send("What is 2+3?", key="once")
        assert reply.text == "2+3 = 5."
        for item in range(items):
            for conversation_id in conversations:
                while True:
                    conversation = await Conversation.open(engine, store=store, id=conversation_id)
                    try:
                        await conversation.send(f"worker {name} item {item}")
                    except HeadConflict:
                        lost += 1
                        continue
                    break
    sys.stdout.write(f"{lost}\n")


def run(name: str, url: str, server: str, items: str, shared: str, *conversations: str) -> None:
    """Send the items in a separate process."""
    asyncio.run(send_items(url, server, name, int(items), shared, list(conversations)))


if __name__ == "__main__":
    store, server, number, *others = sys.argv[1:]
    # Before the fork, because the import and the vocabulary take longer than the work.
    import_module("kedge.engines.http_client")
    get_encoding()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run, args=(f"w{each}", store, server, *others))
        for each in range(int(number))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
