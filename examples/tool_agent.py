"""An agent with tools: the model calls functions until it can answer.

    python examples/tool_agent.py "What is the weather in Lisbon?"

Set KEDGE_MODEL to use another model than the built-in one.
"""

import os
import sys
from datetime import UTC, datetime

from kedge import Chat


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def get_time() -> str:
    """Return the current time in UTC."""
    return f"{datetime.now(UTC):%H:%M}"


if __name__ == "__main__":
    chat = Chat(os.environ.get("KEDGE_MODEL", "practice"), tools=[get_weather, get_time])
    print(chat.sync.chat_with_state(None, sys.argv[1]).text)
