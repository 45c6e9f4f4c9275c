"""The state of one server: its database, models, running generations and connections."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kedge.server.compaction import expand_compaction
from kedge.server.encrypted_content import KEY_BYTES, ContentCipher, parse_reasoning_payload
from kedge.server.errors import MODEL_NOT_FOUND
from kedge.server.json_codec import Item
from kedge.server.models import Model, PracticeModel
from kedge.server.prompt_cache import PromptCache
from kedge.server.settings import Settings
from kedge.server.storage.context import ContextCache
from kedge.server.storage.conversations import ConversationRepository
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.items import NodeRepository, StoredItemLookup
from kedge.server.storage.responses import ResponseRepository
from kedge.server.token_counting import count_items

if TYPE_CHECKING:
    from kedge.server.sse import Stoppable


MAX_REASONING_TEXTS = 10_000
"""Reasoning items whose texts are remembered."""


class SocketConnection(Protocol):
    """A WebSocket connection."""

    def finish(self) -> None:
        """Accept no more requests, because the server stops."""

    def forget(self) -> None:
        """Forget the unstored responses of this connection."""

    def hang_up(self) -> None:
        """Close the connection at once."""


class ServerState:
    """The state of one server. It may only be used in the thread of the event loop.

    Args:
        settings: How the server behaves.

    Raises:
        CannotServe: If the database cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = settings.model
        self.models = dict(settings.models) or {settings.model.name: settings.model}
        self.clock = settings.clock
        self.prompt_cache = PromptCache(settings.clock)
        self.ignores_unknown = settings.unknown_parameters == "ignore" or (
            settings.unknown_parameters is None
            and not all(isinstance(model, PracticeModel) for model in self.models.values())
        )
        self.logged_parameters: set[str] = set()
        """Ignored parameters that the log already names."""
        self.running: set[Stoppable] = set()
        self.sockets: set[SocketConnection] = set()
        self._reasoning_texts: OrderedDict[str, str] = OrderedDict()
        self._database = ServerDatabase(settings.db, shared=settings.shared)
        key = secrets.token_bytes(KEY_BYTES)
        self.cipher = ContentCipher(self._database.get_or_add_fact("sealing key", key) or key)
        cache = ContextCache(settings.limits.cache_bytes)
        self.nodes = NodeRepository(self._database, cache, self.expand_items)
        self.responses = ResponseRepository(
            self._database, self.nodes, settings.clock, settings.retention
        )
        self.conversations = ConversationRepository(
            self._database, self.nodes, settings.clock, count_items
        )
        self.item_lookup = StoredItemLookup(self.nodes, settings.clock)
        if self._database.shared:
            self.responses.fail_unfinished(settings.limits.answer_seconds)
        elif self._database.unclean_shutdown:
            self.responses.fail_unfinished()

    def expand_items(self, items: Sequence[Item]) -> Sequence[Item]:
        """Replace a leading compaction item by the items in it, as a model sees them."""
        return expand_compaction(self.cipher, items)

    def forget(self) -> None:
        """Delete every response, including the unstored ones of connections."""
        self.responses.delete_all()
        for socket in self.sockets:
            socket.forget()

    def purge(self) -> int:
        """Delete one batch of expired responses, or of the oldest ones if there are too many bytes.

        Returns:
            How many objects were deleted; 0 if there is nothing left to delete.
        """
        deleted, limit = self.responses.purge(), self.settings.max_db_bytes
        if deleted or limit is None or self._database.used_bytes() <= limit:
            return deleted
        return self.responses.delete_oldest() or self.conversations.delete_unused()

    def remember_reasoning(self, items: Sequence[Item], texts: Sequence[str]) -> None:
        """Remember the texts of a response's reasoning, which a later response may read."""
        reasoning = [item for item in items if item["type"] == "reasoning"]
        for item, text in zip(reasoning, texts, strict=False):
            self._reasoning_texts[item["id"]] = text
        while len(self._reasoning_texts) > MAX_REASONING_TEXTS:
            self._reasoning_texts.popitem(last=False)

    def read_reasoning(self, item: Item) -> str:
        """Return the text of a reasoning item, remembered or encrypted in it; empty if it is not known."""
        text = self._reasoning_texts.get(item.get("id", ""))
        encrypted = item.get("encrypted_content")
        if text is None and isinstance(encrypted, str):
            payload = parse_reasoning_payload(self.cipher.decrypt(encrypted))
            text = payload.text if payload else None
        return text or ""

    def decrypt_reasoning(self, encrypted: str) -> Any:
        """Return the data that a model attached to its reasoning, or None."""
        payload = parse_reasoning_payload(self.cipher.decrypt(encrypted))
        return None if payload is None else payload.model_data

    def find_model(self, name: str) -> Model:
        """Return the model for a name.

        Raises:
            ApiError: If there is neither a model of this name nor a default.
        """
        chosen = self.models.get(name)
        if chosen is None and name:
            default = self.settings.default
            chosen = self.models.get(default or "") if self.settings.models else self.model
        if chosen is None:
            raise MODEL_NOT_FOUND(model=name)
        return chosen

    async def aclose(self) -> None:
        """Close the connections of the models, then the database."""
        for model in self.models.values():
            await model.aclose()
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._database.close()
