"""A FastAPI endpoint that streams answers as text, and remembers the conversation of each user.

    pip install fastapi uvicorn
    uvicorn --app-dir examples streaming_fastapi:app
    curl -N -X POST "http://127.0.0.1:8000/chat/ada?text=Hello"

Set KEDGE_MODEL to use another model than the built-in one.
"""

import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from kedge import Chat

app = FastAPI()
chat = Chat(os.environ.get("KEDGE_MODEL", "practice"))
states: dict[str, bytes] = {}


@app.post("/chat/{name}")
async def send(name: str, text: str) -> StreamingResponse:
    """Stream the answer to a message of a user."""

    async def answer() -> AsyncIterator[str]:
        async with chat.stream_with_state(states.get(name), text) as stream:
            async for delta in stream.text_deltas():
                yield delta
        states[name] = stream.state

    return StreamingResponse(answer(), media_type="text/plain")
