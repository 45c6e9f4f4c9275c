"""A conversation that continues in the next run, on disk.

    python examples/memory.py "My name is Ada."
    python examples/memory.py "What is my name?"

Set KEDGE_MODEL and KEDGE_STORE to use another model and another database.
"""

import asyncio
import os
import sys

from kedge import Conversation, open_store


async def main(text: str) -> None:
    """Send a message in the stored conversation, or in a new one."""
    model = os.environ.get("KEDGE_MODEL", "practice")
    async with await open_store(os.environ.get("KEDGE_STORE", "sqlite:///memory.db")) as store:
        if rows := await Conversation.list(store, limit=1):
            conversation = await Conversation.open(store, rows[0].id, model)
        else:
            conversation = await Conversation.create(store, model)
        async with conversation:
            print((await conversation.send(text)).text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
