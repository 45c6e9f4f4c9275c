"""Extract typed data from text: nested models, validated, corrected by the model if it is invalid.

    python examples/typed_output.py "I travel to Lisbon for 3 days by ship."

Set KEDGE_MODEL to use another model than the built-in one.
"""

import os
import sys
from typing import Literal

from pydantic import BaseModel

from kedge import Turn, connect, run_sync, user


class Stop(BaseModel):
    """A city and the length of the stay."""

    city: str
    days: int


class Trip(BaseModel):
    """A trip to one city."""

    stop: Stop
    mode: Literal["train", "ship"]


def main(text: str) -> None:
    """Print the trip that a text describes."""
    engine = connect(os.environ.get("KEDGE_MODEL", "practice"))
    reply = run_sync(engine.ask(Turn([user(text)]), output=Trip))
    trip = reply.output
    print(f"{trip.stop.days} days in {trip.stop.city}, by {trip.mode}")


if __name__ == "__main__":
    main(sys.argv[1])
