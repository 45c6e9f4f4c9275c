"""Selection of the model that answers in the page and the API.

A conversation continues with its own provider and model. Three kinds of models can be used: those of the
server of this process, providers known by name (``openai``, ``anthropic``, …) whose addresses and keys
are in this machine's environment, and, by an explicit choice, another model of the server. The page never
connects to an address that only the store contains: the store may contain imported conversations, and
imported data must not determine where keys and messages are sent.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from kedge.conversation.lookup import find_recorded_model
from kedge.engines import Engine
from kedge.engines.base import Events, Request
from kedge.errors import CannotConnect, InvalidSetting, UnconfirmedReference
from kedge.middleware import BaseMiddleware
from kedge.planning import RequestPlan
from kedge.providers import connect, names_address
from kedge.store import ConversationRow, RequestRecord
from kedge.turns import Turn

_ADDRESS = re.compile(r"(?P<provider>responses|chat):https?://(?P<host>[^/#]+)[^#]*#(?P<model>.+)")
_LOCAL_HOST = re.compile(r"^(localhost|127\.[\d.]+|0\.0\.0\.0|\[?::1?\]?)(?=:\d+$|$)")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The engine that answers, and the name of the model to request from it."""

    name: str
    engine: Engine
    request_name: str = ""
    """The ``model`` option of requests; empty for the default model of the engine."""


class _DefaultModel(BaseMiddleware):
    """Middleware that requests one of the server's models, unless a request names another one."""

    name = "model"

    def __init__(self, inner: Engine, model: str) -> None:
        super().__init__(inner)
        self._model = model

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        return super().plan(turn, **{**options, "model": options.get("model") or self._model})

    def events(self, turn: Turn, request: Request) -> Events:
        return super().events(turn, structs.replace(request, model=request.model or self._model))


class ModelSelector:
    """The models that conversations can use.

    Args:
        engine: The engine of the server of this process.
        names: The names of that server's models, the default first.
        base_url: The address of that server's API.
        connect: Returns an engine for a provider that is known by name.
    """

    def __init__(
        self,
        engine: Engine,
        names: tuple[str, ...],
        base_url: str = "",
        connect: Callable[[str], Engine] = connect,
    ) -> None:
        self.engine = engine
        self.names = names
        self._base_url = base_url
        self._connect = connect
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine of the server of this process, and the engines that were connected here."""
        return (self.engine, *self._engines.values())

    def engine_for(self, name: str = "") -> Engine:
        """Return an engine for one of the server's models; the default one if the name is empty.

        Raises:
            InvalidSetting: If the server has no such model.
        """
        self.check_name(name)
        return _DefaultModel(self.engine, name) if name else self.engine

    def check_name(self, name: str) -> None:
        """Check that a name is empty or the name of one of the server's models.

        Raises:
            InvalidSetting: If the server has no such model.
        """
        if name and name not in self.names:
            raise InvalidSetting(f"there is no model {name!r} here; {self._describe_choice()}")

    def _describe_choice(self) -> str:
        return f"choose a model of this server: {', '.join(self.names)}"

    def with_engine(
        self, engine: Engine, connect: Callable[[str], Engine] | None = None
    ) -> "ModelSelector":
        """Return the same models with another engine and separate connections."""
        return ModelSelector(engine, self.names, self._base_url, connect or self._connect)

    def recorded_name(self, row: ConversationRow, response: RequestRecord | None) -> str:
        """Return the name of the model that a conversation was last used with.

        Args:
            row: The conversation; its data may contain the model string.
            response: The newest response on the path to continue, if there is one.

        Returns:
            The name of a model of the server, or a model string; the default model if none is recorded.
        """
        recorded = find_recorded_model(row, response).removeprefix("kedge:")
        if not recorded:
            return self.names[0]
        address = _ADDRESS.fullmatch(recorded)
        if address is None:
            return recorded
        host = address["host"]
        model = address["model"]
        # The practice model is the same everywhere, and the Chat Completions API stores nothing.
        is_practice = model == "practice" and address["provider"] == "chat"
        if self._is_own(host) or (is_practice and _LOCAL_HOST.match(host)):
            return model
        return recorded

    def _is_own(self, address: str) -> bool:
        """Return whether an address without a scheme is one of this server's names."""
        own_host = _normalize_host(self._base_url.partition("//")[2])
        return bool(own_host) and own_host == _normalize_host(address)

    def select(
        self, row: ConversationRow, response: RequestRecord | None, requested: str = ""
    ) -> ModelChoice:
        """Choose the model for the next request of a conversation.

        Args:
            row: The conversation.
            response: The newest response on the path to continue, if there is one.
            requested: The model that the user chose, if any.

        Raises:
            InvalidSetting: If the requested model is not one of the server's.
            CannotConnect: If the conversation's own model is not available here.
        """
        recorded = self.recorded_name(row, response)
        name = requested or recorded
        if name in self.names:
            return ModelChoice(name, self.engine, name)
        if name != recorded:
            self.check_name(name)
        if names_address(name):
            raise UnconfirmedReference(
                f"this conversation uses {name}, which is not configured on this server; "
                f"{self._describe_choice()}"
            )
        if name not in self._engines:
            try:
                self._engines[name] = self._connect(name)
            except CannotConnect:
                if response is None or not self._is_own(response.scope.partition("/")[2]):
                    raise
                self.check_name(response.model)
                return ModelChoice(response.model, self.engine, response.model)
        return ModelChoice(name, self._engines[name])

    async def aclose(self) -> None:
        """Close the engines that were connected here."""
        for engine in self.engines[1:]:
            await engine.aclose()


def _normalize_host(address: str) -> str:
    """Return the host of an address without a scheme, with one name for all names of this machine."""
    return _LOCAL_HOST.sub("localhost", address.partition("/")[0])
