"""The parts of one server, put together: the database, what it remembers, the model, what runs."""

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from kedge.server.compaction import read_out
from kedge.server.contexts import ContextCache
from kedge.server.errors import MODEL_NOT_FOUND
from kedge.server.known import KnownItems
from kedge.server.models import Model
from kedge.server.nodes import Nodes
from kedge.server.sealing import KEY_BYTES, Sealer
from kedge.server.settings import Settings
from kedge.server.sqlite import Database
from kedge.server.stored import Responses
from kedge.server.talks import Conversations
from kedge.server.thoughts import read_thought
from kedge.server.wire import Item
from kedge.tokens import count_items


class Stoppable(Protocol):
    """Something that runs and can be ended from outside."""

    def stop(self, status: str) -> None:
        """End it."""


class Socket(Protocol):
    """A WebSocket connection."""

    def finish(self) -> None:
        """Take no more requests, because the server stops."""

    def forget(self) -> None:
        """Lose everything that was only remembered there."""

    def hang_up(self) -> None:
        """Break off, whatever runs on it."""


class Service:
    """One server's state. Everything in it runs in the thread of the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = settings.model
        self.models = dict(settings.models) or {settings.model.name: settings.model}
        self.clock = settings.clock
        self.running: set[Stoppable] = set()
        self.sockets: set[Socket] = set()
        self._database = Database(settings.db)
        key = secrets.token_bytes(KEY_BYTES)
        self.sealer = Sealer(self._database.fact("sealing key", key) or key)
        cache = ContextCache(settings.limits.cache_bytes)
        self.nodes = Nodes(self._database, cache, self.read)
        self.responses = Responses(self._database, self.nodes, settings.clock, settings.retention)
        self.conversations = Conversations(self._database, self.nodes, settings.clock, count_items)
        self.known = KnownItems(self.nodes, settings.clock)
        if self._database.crashed:
            self.responses.fail_unfinished()

    def read(self, items: Sequence[Item]) -> Sequence[Item]:
        """Show items as a model sees them: a compaction is read out."""
        return read_out(self.sealer, items)

    def forget(self) -> None:
        """Delete every response, also those that only a connection remembers."""
        self.responses.forget()
        for socket in self.sockets:
            socket.forget()

    def unseal(self, sealed: str) -> Any:
        """Give back what a model wanted kept with a thought; None if that was nothing."""
        thought = read_thought(self.sealer.open(sealed))
        return None if thought is None else thought.kept

    def find_model(self, name: str) -> Model:
        """Find the model of this name, or the one that answers to any name, or refuse it."""
        chosen = self.models.get(name)
        if chosen is None and name:
            default = self.settings.default
            chosen = self.models.get(default or "") if self.settings.models else self.model
        if chosen is None:
            raise MODEL_NOT_FOUND(model=name)
        return chosen

    async def aclose(self) -> None:
        """Let go of the models' connections, then close the database."""
        for model in self.models.values():
            await model.aclose()
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._database.close()
