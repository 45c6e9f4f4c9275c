"""Typed data from text: nested, validated, and corrected by the model if it is invalid.

    python examples/typed_output.py "I travel to Lisbon for 3 days by ship."

Set KEDGE_MODEL to use another model than the built-in one.
"""

import os
import sys
from typing import Literal

from pydantic import BaseModel

from kedge import Chat


class Stop(BaseModel):
    """A city and the length of the stay."""

    city: str
    days: int


class Trip(BaseModel):
    """A trip to one city."""

    stop: Stop
    mode: Literal["train", "ship"]


if __name__ == "__main__":
    chat = Chat(os.environ.get("KEDGE_MODEL", "practice"))
    trip = chat.sync.chat_with_state(None, sys.argv[1], output=Trip).output
    print(f"{trip.stop.days} days in {trip.stop.city}, by {trip.mode}")
