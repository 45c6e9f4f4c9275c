"""A separate process that opens a conversation and continues it.

python reopen.py STORE SERVER CONVERSATION
"""

import asyncio
import sys

from kedge import Conversation, connect, open_store


async def send_followup(url: str, server: str, name: str) -> None:
    """Send one more question, and print the answer."""
    engine = connect(f"responses:{server}#practice")
    async with open_store(url) as store, engine:
        conversation = await Conversation.open(engine, store=store, id=name)
        reply = await conversation.send("What is my name?")
        sys.stdout.write(reply.text)


if __name__ == "__main__":
    asyncio.run(send_followup(*sys.argv[1:]))
