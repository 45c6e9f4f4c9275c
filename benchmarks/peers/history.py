"""What every peer does with a script, whatever its messages look like."""

from typing import Any

INSTRUCTIONS = "Be brief."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Peer:
    """A library, used as its documentation says. A conversation is a list of turns, each a list of messages.

    Args:
        base_url: The base URL of the server.
        chained: Whether ``kedge.chain`` is applied to its client.
        folder: An empty folder for files.
    """

    modules: tuple[str, ...] = ()
    """What a program imports."""
    packages: tuple[str, ...] = ()
    """What a program installs."""
    durable = False
    """Whether every turn is saved to disk."""

    def __init__(self, base_url: str, chained: bool, folder: str) -> None:
        self.base_url = base_url
        self.chained = chained
        self.folder = folder
        self.turns: list[list[Any]] = []
        self.branch: list[list[Any]] = []

    @property
    def history(self) -> list[Any]:
        """The messages of all turns."""
        return [message for turn in self.turns for message in turn]

    def make_openai_client(self) -> Any:
        """Return the client of the provider's SDK."""
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=self.base_url, api_key="key", max_retries=0)
        if self.chained:
            import kedge

            client = kedge.chain(client)
        return client

    async def open(self) -> None:
        """Create the client and the agent."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close what was opened."""

    async def send(self, text: str) -> str:
        """Send a message, add the turn to the conversation and return the answer."""
        raise NotImplementedError

    async def stream(self, text: str) -> None:
        """Send a message and read the events of its answer one by one."""
        raise NotImplementedError

    def make_user(self, text: str) -> Any:
        """Return a message of the user."""
        raise NotImplementedError

    def with_text(self, turn: list[Any], text: str) -> list[Any]:
        """Return a turn with another text of the user."""
        return [self.make_user(text), *turn[1:]]

    async def changed(self) -> None:
        """Do what the library needs after the turns have been changed."""

    async def edit(self, turn: int, text: str) -> None:
        """Change the user's message of a turn, and keep the turns after it."""
        self.turns[turn] = self.with_text(self.turns[turn], text)
        await self.changed()

    async def undo(self) -> None:
        """Remove the last turn."""
        del self.turns[-1]
        await self.changed()

    async def fork(self, turn: int) -> None:
        """Continue from the first turns; the conversation as it is stays available."""
        self.branch = list(self.turns)
        del self.turns[turn:]
        await self.changed()

    async def switch(self) -> None:
        """Continue the conversation from which the fork was made."""
        self.turns = list(self.branch)
        await self.changed()

    async def summarize(self, turns: int, text: str) -> None:
        """Replace the first turns by a message."""
        self.turns[:turns] = [[self.make_user(text)]]
        await self.changed()

    async def restart(self) -> None:
        """Save the conversation, drop everything in memory and load it again."""
        saved = self.dump()
        await self.close()
        self.load(saved)
        await self.open()
        await self.changed()

    def dump(self) -> str:
        """Return the turns as text."""
        raise NotImplementedError

    def load(self, text: str) -> None:
        """Read the turns from text."""
        raise NotImplementedError
