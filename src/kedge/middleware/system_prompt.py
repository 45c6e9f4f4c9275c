"""``system_prompt``: fresh instructions at the front of every Turn.

Leading system text is no part of any digest, so it may change with every request at no cost.
"""

from collections.abc import Callable

from kedge.engines.protocol import Engine, Middleware
from kedge.middleware.wrapping import Wrapped
from kedge.turns import Turn, system

NAME = "system_prompt"


def system_prompt(text: str | Callable[[Turn], str]) -> Middleware:
    """Put instructions at the front: a text, or a function that makes one from the Turn."""

    def wrap(engine: Engine) -> Engine:
        return _SystemPrompt(engine, text)

    return wrap


class _SystemPrompt(Wrapped):
    name = NAME

    def __init__(self, inner: Engine, text: str | Callable[[Turn], str]) -> None:
        super().__init__(inner)
        self.text = text

    def enter(self, turn: Turn) -> Turn:
        """Put the text first, in the place of the one that was put there last time."""
        text = self.text if isinstance(self.text, str) else self.text(turn)
        for block in turn.leading:
            if block.origin == NAME:
                fresh = system(text, origin=NAME, id=block.id)
                return turn if fresh == block else turn.replace(block.id, fresh)
        return turn.insert(0, system(text, origin=NAME))
