"""Thoughts as they are sealed: what a model thought, and what it wants back with that thought.

A model behind the server may have a signature or encrypted content of its own for a thought. It
travels inside the server's seal, so that a client carries one opaque text, and whatever comes back
is proved to be what went out.
"""

from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Thought:
    """One thought: its text, what the model wants kept with it, whether its text was shown."""

    text: str
    kept: Any = None
    shown: bool = True

    def as_value(self) -> Any:
        """Give the JSON value to seal: the bare text where there is nothing else."""
        if self.kept is None and self.shown:
            return self.text
        return {"thought": self.text, "kept": self.kept, "shown": self.shown}


def read_thought(value: object) -> Thought | None:
    """Read the value of an opened seal; None if it holds something else."""
    if isinstance(value, str):
        return Thought(value)
    if isinstance(value, dict) and "thought" in value:
        held = cast("dict[str, Any]", value)
        return Thought(held["thought"], held["kept"], held["shown"])
    return None
