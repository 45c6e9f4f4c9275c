"""A worker on conversations that others work on too.

    python worker.py STORE SERVER NAME ITEMS SHARED CONVERSATION...

Says every item in every conversation, each until it is on the line of the head; and asks one shared
question under one key, as everybody does. Prints how often it lost a race.
"""

import asyncio
import sys

from kedge import Conversation, HeadConflict, connect, open_store


async def send_items(
    url: str, server: str, name: str, items: int, shared: str, conversations: list[str]
) -> None:
    """Do the work, and say how it went."""
    lost = 0
    engine = connect(f"responses:{server}#practice")
    async with await open_store(url) as store, engine:
        common = await Conversation.open(store, shared, engine)
        reply = await common.send("What is 2+3?", key="once")
        assert reply.text == "2+3 = 5."
        for item in range(items):
            for talk in conversations:
                while True:
                    conversation = await Conversation.open(store, talk, engine)
                    try:
                        await conversation.send(f"worker {name} item {item}")
                    except HeadConflict:
                        lost += 1
                        continue
                    break
    sys.stdout.write(f"{lost}\n")


if __name__ == "__main__":
    store, server, name, items, shared, *talks = sys.argv[1:]
    asyncio.run(send_items(store, server, name, int(items), shared, talks))
