"""The parts of one server, put together: the database, what it remembers, the model, what runs."""

from collections.abc import Sequence

from kedge.server.contexts import ContextCache
from kedge.server.nodes import Nodes
from kedge.server.settings import Settings
from kedge.server.sqlite import Database
from kedge.server.stored import Responses
from kedge.server.talks import Conversations
from kedge.server.wire import Item


class Service:
    """One server's state. Everything in it runs in the thread of the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = settings.model
        self.clock = settings.clock
        self.database = Database(settings.db)
        self.cache = ContextCache(settings.limits.cache_bytes)
        self.nodes = Nodes(self.database, self.cache, self.read)
        self.responses = Responses(self.database, self.nodes, settings.clock, settings.retention)
        self.conversations = Conversations(self.database, self.nodes, settings.clock)
        self.responses.fail_unfinished()

    def read(self, items: Sequence[Item]) -> Sequence[Item]:
        """Show items as a model sees them."""
        return items

    def close(self) -> None:
        """Close the database."""
        self.database.close()
