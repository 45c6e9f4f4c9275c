"""The users of a page: a service for each, and the tokens with which the page calls the server for them.

Every request is answered by the service of its caller, with the store and the runs of one user. The page
also sends messages to the server of this process as that user, with a token that is valid in this process only.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from kedge.engines import Engine
from kedge.errors import CannotConnect
from kedge.server.access import CALLER_KEY
from kedge.store import AccessToken, TokenRegistry, TokenUse
from kedge.web.runs import RunRegistry
from kedge.web.service import ConversationService

if TYPE_CHECKING:
    from kedge.web.models import ModelSelector


class DelegatedTokens:
    """The named tokens of a store, and the tokens with which a page calls the server for their owners.

    Args:
        registry: The named tokens.
    """

    def __init__(self, registry: TokenRegistry) -> None:
        self._registry = registry
        self._callers: dict[str, AccessToken] = {}

    def issue(self, caller: AccessToken) -> str:
        """Return a token for requests of the page on behalf of a caller."""
        secret = secrets.token_urlsafe(32)
        self._callers[secret] = caller
        return secret

    async def is_required(self) -> bool:
        """Return whether requests need a token."""
        return await self._registry.is_required()

    async def find(self, token: str) -> AccessToken | None:
        """Return the caller of a token, unless it was revoked."""
        caller = self._callers.get(token)
        if caller is None:
            return await self._registry.find(token)
        if not await self._registry.is_valid(caller):
            return None
        # The request to the page was counted; its scopes were checked there.
        return replace(caller, requests_per_minute=None, scopes=frozenset({"server"}))

    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> TokenUse:
        """Add to the counts of a token in the current minute, and return them."""
        return await self._registry.count(name, requests=requests, tokens=tokens)


class UserServices:
    """The services of all users.

    Args:
        service: The service of the administrator.
        connect: Returns an engine that calls the server of this process for a caller.
    """

    def __init__(
        self,
        service: ConversationService,
        connect: Callable[[AccessToken], Engine] | None = None,
    ) -> None:
        self._connect = connect
        self._services = {"": service}
        self._models: dict[AccessToken, ModelSelector] = {}

    def get(self, caller: AccessToken | None) -> ConversationService:
        """Return the service of a caller, which is None for the administrator."""
        admin = self._services[""]
        if caller is None or self._connect is None:
            return admin
        service = self._services.get(caller.namespace)
        if service is None:
            store = admin.store.use_namespace(caller.namespace)
            service = replace(admin, store=store, runs=RunRegistry())
            self._services[caller.namespace] = service
        if caller not in self._models:
            reject = {} if not caller.namespace else {"connect": _reject_provider}
            self._models[caller] = admin.models.with_engine(self._connect(caller), **reject)
        return replace(service, models=self._models[caller])

    async def aclose(self) -> None:
        """Stop all runs, complete the scheduled deletions, and close the connections."""
        for service in list(self._services.values()):
            await service.runs.stop_all()
        await self._services[""].deletions.aclose()
        for models in list(self._models.values()):
            await models.aclose()
            await models.engine.aclose()


def get_service(request: HTTPConnection) -> ConversationService:
    """Return the service of the user who sent a request."""
    services: UserServices = request.app.state.services
    return services.get(request.scope.get(CALLER_KEY))


def _reject_provider(name: str) -> Engine:
    """Reject a provider that would use this machine's keys, which belong to the administrator."""
    raise CannotConnect(f"{name} is not available to users; choose a model of this server")
