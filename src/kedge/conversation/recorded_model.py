"""Find the model that a conversation was last used with, from its data and its newest response."""

import re

from kedge.planning.render import base_scope
from kedge.providers import ADDRESS_PROVIDERS
from kedge.store import ConversationRow, RequestRecord

MODEL_KEY = "model"
"""The member of a conversation's data with the model string that it was last used with."""
SERVER_SCOPE = "kedge/"
"""The beginning of the scopes of servers with a page; see ``serve.database_scope``."""
_ACCOUNT_HASH = re.compile(r"/[0-9a-f]{16}\Z")
_LOCAL_HOST = re.compile(r"(localhost|127\.[\d.]+|\[?::1\]?)(:\d+)?(/|\Z)")


def find_recorded_model(row: ConversationRow, response: RequestRecord | None) -> str:
    """Return the model string that a conversation was last used with; empty if none is recorded.

    The command line, the page, the API and MCP all continue a conversation with this model, unless the user
    names another one. A model string with an address must be confirmed before it is used, because
    the store may contain imported conversations.

    Args:
        row: The conversation; its data may contain the model string.
        response: The newest response on the path to continue, if there is one.

    Returns:
        A model string. For a model of ``kedge serve`` with another name than ``practice`` it begins with
        ``kedge:``, which only that server can use.
    """
    data = row.data.get(MODEL_KEY)
    stored = data if isinstance(data, str) else ""
    if response is None:
        return stored
    if response.scope.startswith(SERVER_SCOPE):
        return response.model if response.model == "practice" else f"kedge:{response.model}"
    if response.provider in (stored.partition(":")[0], "practice"):
        return stored or response.provider
    return name_model(response.provider, response.scope, response.model)


def name_model(provider: str, scope: str, model: str) -> str:
    """Return the model string for a model at the address in a scope, which has no scheme."""
    if provider not in ADDRESS_PROVIDERS:
        return f"{provider}:{model}"
    address = base_scope(scope).removeprefix(f"{provider}/").replace("%20", " ")
    address = _ACCOUNT_HASH.sub("", address)
    scheme = "http" if _LOCAL_HOST.match(address) else "https"
    return f"{provider}:{scheme}://{address}#{model}"
