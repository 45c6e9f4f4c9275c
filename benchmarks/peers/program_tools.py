"""The tools and the type that the programs of all libraries use."""

import sys

from pydantic import BaseModel

BASE_URL, *ARGUMENTS = sys.argv[2:]
"""The address of the server, and what follows it."""
ADD, REMOVE = "Please call add with a=2 and b=3", "Please call remove with name=notes"
TRIP = "I travel to Lisbon for 3 days."
NOTES = [f"Note number {number}." for number in range(8)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def remove(name: str) -> str:
    """Remove a file."""
    print(f"removing {name}")
    return f"removed {name}"


class Stop(BaseModel):
    """A stop of a trip."""

    city: str
    days: int
