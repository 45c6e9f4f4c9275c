"""The state of one server: its database, models, running generations and connections."""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kedge._internal.access_tokens import AccessToken, TokenReservation
from kedge._internal.bounded_dict import BoundedDict
from kedge.errors import describe_extra
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


StopStatus = Literal["failed", "cancelled"]
"""How a response ends that is stopped from outside: ``failed`` if its server shuts down, else ``cancelled``."""


class Stoppable(Protocol):
    """Protocol of what the server stops before it closes its connections."""

    def stop(self, status: StopStatus, /) -> None:
        """End soon, with this status."""


class SharedState:
    """What all namespaces of one server share: the settings, the models, the database, and what is running.

    Args:
        settings: The settings of the server.

    Raises:
        CannotServe: If the database cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.access = AccessPolicy(
            settings.token, settings.any_host, settings.callers, settings.limits.header_bytes
        )
        self.model = settings.model
        self.models = dict(settings.models) or {settings.model.name: settings.model}
        is_practice = all(isinstance(model, PracticeModel) for model in self.models.values())
        self.ignores_unknown = settings.unknown_parameters == "ignore" or (
            settings.unknown_parameters is None and not is_practice
        )
        if not settings.encrypts and not is_practice:
            log.warning(
                "reasoning of models is neither requested nor returned in encrypted form: %s",
                describe_extra("encryption"),
            )
        self.logged_parameters: set[str] = set()
        """Ignored parameters that the log already names."""
        self.running: set[Stoppable] = set()
        self.sockets: set[ServerConnection] = set()
        self.database = open_server_database(settings)
        self.contexts = ContextCache(settings.limits.cache_bytes)
        new_key = secrets.token_bytes(encrypted_content.KEY_BYTES)
        self.key = self.database.get_or_add_fact("sealing key", new_key) or new_key
        """The key of the database, from which the keys of the namespaces are derived."""
        self.node_keys = NodeKeys(self.key)
        self._namespaces: dict[str, Namespace] = {}

    def get_namespace(self, name: str) -> "Namespace":
        """Return a namespace, with its caches; an empty name is the namespace of the administrator."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            namespace = Namespace(self, name)
            self._namespaces[name] = namespace
        return namespace


class Namespace:
    """What each namespace has for itself: its key, its caches, and its rows of the database.

    Args:
        shared: What it shares with the other namespaces.
        name: Its name; empty for the administrator.
    """

    def __init__(self, shared: SharedState, name: str) -> None:
        self.name = name
        key = shared.key
        if name:
            key = hmac.digest(shared.key, b"namespace " + name.encode(), hashlib.sha256)
        self.cipher = ContentCipher(key, is_available=shared.settings.encrypts)
        self.prompt_cache = PromptCache(shared.database.clock)
        self.reasoning_texts = BoundedDict[str, str](MAX_REASONING_TEXTS)
        expand = partial(encrypted_content.expand_compaction, self.cipher)
        self.nodes = NodeRepository(
            shared.database, shared.contexts, expand, shared.node_keys, name
        )
        self.responses = ResponseRepository(shared.database, self.nodes, shared.settings.retention)
        self.conversations = ConversationRepository(shared.database, self.nodes)


class ServerState:
    """The state of one server, in the namespace of the administrator or of a caller.

    It may only be used in the thread of the event loop. Functions that read or write the database are called by
    ``run`` and ``submit``. Objects that were stored, cached or encrypted in another namespace are not found, read or
    decrypted.

    Args:
        shared: What all namespaces of the server share.
        namespace: The namespace.
        caller: The caller whose limits apply; None for the administrator.
    """

    def __init__(
        self, shared: SharedState, namespace: Namespace, caller: AccessToken | None = None
    ) -> None:
        self._shared = shared
        self._namespace = namespace
        self._caller = caller
        self._database = shared.database
        self.settings = shared.settings
        self.access = shared.access
        self.model = shared.model
        self.models = shared.models
        self.ignores_unknown = shared.ignores_unknown
        self.logged_parameters = shared.logged_parameters
        self.running = shared.running
        self.sockets = shared.sockets
        self.clock = shared.database.clock
        self.claims = shared.database.claims
        self.run = shared.database.run
        self.submit = shared.database.submit
        self.transact = shared.database.transact
        self.check_health = shared.database.check_health
        self.namespace = namespace.name
        self.cipher = namespace.cipher
        self.prompt_cache = namespace.prompt_cache
        self.nodes = namespace.nodes
        self.responses = namespace.responses
        self.conversations = namespace.conversations

    @classmethod
    def open(cls, settings: Settings) -> "ServerState":
        """Open the database of a server, and mark the responses that an earlier process left unfinished as failed.

        Args:
            settings: The settings of the server.

        Returns:
            The state in the namespace of the administrator.

        Raises:
            CannotServe: If the database cannot be opened.
        """
        shared = SharedState(settings)
        state = cls(shared, shared.get_namespace(""))
        if shared.database.in_store and shared.database.claims is None:
            state.responses.fail_unfinished(settings.limits.answer_seconds)
        elif shared.database.unclean_shutdown:
            state.responses.fail_unfinished()
        return state

    def view_namespace(self, namespace: str) -> "ServerState":
        """Return this state for a namespace."""
        return ServerState(self._shared, self._shared.get_namespace(namespace))

    def view_as(self, caller: AccessToken) -> "ServerState":
        """Return this state for a caller."""
        return ServerState(self._shared, self._shared.get_namespace(caller.namespace), caller)

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
            deleted = self.responses.purge()
            limit = self.settings.max_db_bytes
            if deleted or limit is None or self._database.used_bytes() <= limit:
                return deleted
            return self.responses.delete_oldest() or self.conversations.delete_unused()

        return self._database.run_purge(purge_batch)

    def encrypts_reasoning(self, body: Mapping[str, Any]) -> bool:
        """Return whether the response to a request contains encrypted reasoning: if it asks for it, and we encrypt."""
        is_requested = "reasoning.encrypted_content" in (body.get("include") or ())
        return is_requested and self.cipher.is_available

    def remember_reasoning(self, items: Sequence[Item], texts: Sequence[str]) -> None:
        """Cache the texts of a response's reasoning, which a later response may read."""
        reasoning = [item for item in items if item["type"] == "reasoning"]
        for item, text in zip(reasoning, texts, strict=False):
            self._namespace.reasoning_texts[item["id"]] = text

    def read_reasoning(self, item: Item) -> str:
        """Return the text of a reasoning item, cached or decrypted; empty if it is unknown."""
        text = self._namespace.reasoning_texts.get(item.get("id", ""))
        encrypted = item.get("encrypted_content")
        if text is None and isinstance(encrypted, str):
            payload = self._decrypt_payload(encrypted)
            if payload is not None:
                text = payload.text
        return text or ""

    def decrypt_reasoning(self, encrypted: str) -> Any:
        """Return the data that a model attached to its reasoning, or None."""
        payload = self._decrypt_payload(encrypted)
        return None if payload is None else payload.model_data

    def _decrypt_payload(self, encrypted: str) -> encrypted_content.ReasoningPayload | None:
        if not self.cipher.is_available:  # it was stored while the package was installed
            return None
        return encrypted_content.parse_reasoning_payload(self.cipher.decrypt(encrypted))

    def find_model(self, name: str) -> Model:
        """Return the model for a name.

        Raises:
            ApiError: If there is neither a model of this name nor a default.
        """
        model = self.models.get(name)
        if model is None and name:
            model = self._find_default_model()
        if model is None:
            raise MODEL_NOT_FOUND(model=name)
        return model

    def _find_default_model(self) -> Model | None:
        """Return the model for unknown names, if there is one."""
        if not self.settings.models:
            return self.model
        return self.models.get(self.settings.default or "")

    async def aclose(self) -> None:
        """Close the connections of the models, then the database."""
        for model in self.models.values():
            await model.aclose()
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._database.close()
