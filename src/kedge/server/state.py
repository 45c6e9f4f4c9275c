"""The state of one server: its database, models, running generations and connections."""

import copy
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kedge._internal.access_tokens import AccessToken, TokenReservation
from kedge._internal.bounded_dict import BoundedDict
from kedge.server import encrypted_content
from kedge.server.access import DEFAULT_OUTPUT_TOKENS, AccessPolicy, Rejection
from kedge.server.encrypted_content import ContentCipher
from kedge.server.errors import MODEL_NOT_FOUND
from kedge.server.models import Model, PracticeModel
from kedge.server.object_forms import Item, NodeKeys
from kedge.server.prompt_cache import PromptCache
from kedge.server.settings import Settings
from kedge.server.storage.context import ContextCache
from kedge.server.storage.database import open_server_database
from kedge.server.storage.items import NodeRepository
from kedge.server.storage.responses import ConversationRepository, ResponseRepository

if TYPE_CHECKING:
    from kedge.server.websocket import ServerConnection

log = logging.getLogger("kedge.server")

MAX_REASONING_TEXTS = 10_000
"""The maximum number of reasoning items whose texts are cached."""


class Stoppable(Protocol):
    """Protocol of what the server stops before it closes its connections."""

    def stop(self, status: str, /) -> None:
        """End soon, as ``failed`` if the server shuts down."""


class ServerState:
    """The state of one server, in the namespace of the administrator or of a caller.

    It may only be used in the thread of the event loop, and by functions that ``run`` and ``submit`` call:
    those that read or write the database. Objects that were stored, cached or encrypted in another
    namespace are not found, read or decrypted.

    Args:
        settings: The settings of the server.

    Raises:
        CannotServe: If the database cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._caller: AccessToken | None = None
        self.access = AccessPolicy(
            settings.token, settings.any_host, settings.callers, settings.limits.header_bytes
        )
        self._views: dict[str, ServerState] = {}
        self.model = settings.model
        self.models = dict(settings.models) or {settings.model.name: settings.model}
        self._database = open_server_database(settings)
        self.clock = self._database.clock
        self.claims = self._database.claims
        self.run = self._database.run
        self.submit = self._database.submit
        self.transact = self._database.transact
        self.check_health = self._database.check_health
        self.ignores_unknown = settings.unknown_parameters == "ignore" or (
            settings.unknown_parameters is None
            and not all(isinstance(model, PracticeModel) for model in self.models.values())
        )
        self.logged_parameters: set[str] = set()
        """Ignored parameters that the log already names."""
        self.running: set[Stoppable] = set()
        self.sockets: set[ServerConnection] = set()
        key = secrets.token_bytes(encrypted_content.KEY_BYTES)
        self._key = self._database.get_or_add_fact("sealing key", key) or key
        self._cache = ContextCache(settings.limits.cache_bytes)
        self._bind("", self._key)
        if self._database.in_store and self.claims is None:
            self.responses.fail_unfinished(settings.limits.answer_seconds)
        elif self._database.unclean_shutdown:
            self.responses.fail_unfinished()

    def view_namespace(self, namespace: str) -> "ServerState":
        """Return this state for a namespace."""
        view = self._views.get(namespace)
        if view is None:
            key = hmac.digest(self._key, b"namespace " + namespace.encode(), hashlib.sha256)
            view = copy.copy(self)
            view._bind(namespace, key)  # noqa: SLF001 - of this class
        return view

    def view_as(self, caller: AccessToken) -> "ServerState":
        """Return this state for a caller."""
        view = copy.copy(self.view_namespace(caller.namespace))
        view._caller = caller  # noqa: SLF001 - of this class
        return view

    def _bind(self, namespace: str, key: bytes) -> None:
        """Bind the state to a namespace, with separate rows, caches and key on the same connections."""
        self.namespace = namespace
        self.cipher = ContentCipher(key)
        self.prompt_cache = PromptCache(self.clock)
        self._reasoning_texts = BoundedDict[str, str](MAX_REASONING_TEXTS)
        self.nodes = NodeRepository(
            self._database, self._cache, self.expand_items, NodeKeys(self._key), namespace
        )
        self.responses = ResponseRepository(self._database, self.nodes, self.settings.retention)
        self.conversations = ConversationRepository(self._database, self.nodes)
        self._views[namespace] = self

    @property
    def is_database_free(self) -> bool:
        """Whether statements can be run in the thread of the loop, now and without a round trip."""
        return self._database.is_free

    async def reserve_tokens(
        self, input_tokens: int, max_output_tokens: int | None
    ) -> TokenReservation | None:
        """Reserve the estimated tokens of a request, if its caller has a token limit.

        Raises:
            ApiError: If the limit is reached, or the tokens cannot be counted.
        """
        if self._caller is None:
            return None
        output = DEFAULT_OUTPUT_TOKENS if max_output_tokens is None else max_output_tokens
        reserved = await self.access.reserve(self._caller, input_tokens + output)
        if not isinstance(reserved, Rejection):
            return reserved
        error = reserved.error(**reserved.values)
        if "retry-after" in reserved.headers:
            error.headers["retry-after"] = reserved.headers["retry-after"]
        raise error

    def expand_items(self, items: Sequence[Item]) -> Sequence[Item]:
        """Replace a leading compaction item by the items in it, as a model sees them."""
        return encrypted_content.expand_compaction(self.cipher, items)

    def forget(self) -> None:
        """Delete every response, including the unstored ones of connections."""
        self.responses.delete_all()
        for socket in self.sockets:
            socket.forget()

    def purge(self) -> int:
        """Delete one batch of expired responses, or of the oldest ones if there are too many bytes.

        Returns:
            The number of deleted objects; 0 if there is nothing left to delete.
        """

        def purge_batch() -> int:
            deleted, limit = self.responses.purge(), self.settings.max_db_bytes
            if deleted or limit is None or self._database.used_bytes() <= limit:
                return deleted
            return self.responses.delete_oldest() or self.conversations.delete_unused()

        return self._database.run_purge(purge_batch)

    def encrypts_reasoning(self, body: Mapping[str, Any]) -> bool:
        """Return whether the response to a request contains encrypted reasoning.

        Raises:
            ApiError: The request asks for it, and the package that encrypts is not installed.
        """
        if "reasoning.encrypted_content" not in (body.get("include") or ()):
            return False
        if not self.settings.encryption_optional:
            self.cipher.require("include")
        return self.cipher.is_available

    def remember_reasoning(self, items: Sequence[Item], texts: Sequence[str]) -> None:
        """Cache the texts of a response's reasoning, which a later response may read."""
        reasoning = [item for item in items if item["type"] == "reasoning"]
        for item, text in zip(reasoning, texts, strict=False):
            self._reasoning_texts[item["id"]] = text

    def read_reasoning(self, item: Item) -> str:
        """Return the text of a reasoning item, cached or decrypted; empty if it is unknown."""
        text = self._reasoning_texts.get(item.get("id", ""))
        encrypted = item.get("encrypted_content")
        if text is None and isinstance(encrypted, str):
            payload = encrypted_content.parse_reasoning_payload(self.cipher.decrypt(encrypted))
            text = payload.text if payload else None
        return text or ""

    def decrypt_reasoning(self, encrypted: str) -> Any:
        """Return the data that a model attached to its reasoning, or None."""
        payload = encrypted_content.parse_reasoning_payload(self.cipher.decrypt(encrypted))
        return None if payload is None else payload.model_data

    def find_model(self, name: str) -> Model:
        """Return the model for a name.

        Raises:
            ApiError: If there is neither a model of this name nor a default.
        """
        model = self.models.get(name)
        if model is None and name:
            default = self.settings.default
            model = self.models.get(default or "") if self.settings.models else self.model
        if model is None:
            raise MODEL_NOT_FOUND(model=name)
        return model

    async def aclose(self) -> None:
        """Close the connections of the models, then the database."""
        for model in self.models.values():
            await model.aclose()
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._database.close()
