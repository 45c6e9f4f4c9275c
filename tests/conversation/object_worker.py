"""A process that continues a conversation in a conversation object.

    python object_worker.py STORE SERVER CONVERSATION NAME

It sends messages in a fork of the conversation in the store; if the conversation is ``-``, in a copy that it imports
from standard input into a store of its own. It prints its Turn as JSON.
"""

import asyncio
import sys

from kedge import Conversation, connect, open_store
from kedge.turns import dumps


async def send_messages(url: str, server: str, conversation: str, name: str) -> None:
    """Send messages, and print the Turn."""
    engine = connect(f"responses:{server}#practice", mode="conversation", max_retries=0)
    async with open_store(url) as store, engine:
        if conversation == "-":
            (row,) = await store.import_(sys.stdin.read())
            branch = await Conversation.open(engine, store=store, id=row.id)
        else:
            branch = await (await Conversation.open(engine, store=store, id=conversation)).fork()
        for number in range(3):
            await branch.send(f"This is message {number} of {name}")
        sys.stdout.write(dumps(branch.turn))


if __name__ == "__main__":
    asyncio.run(send_messages(*sys.argv[1:]))
