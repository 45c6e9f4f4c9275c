"""Kedge: stateful conversations with language models.

A Turn contains the complete conversation; a response stored by a server is only a cache of a prefix of it.

Most programs import everything from here; the packages below are for extensions. ``import kedge`` loads no
other module: a name loads its module when it is first used. A name has one line in ``HOMES`` and one under
``TYPE_CHECKING`` for type checkers and editors; a test compares the two. Errors that only one package raises
are in ``kedge.errors``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

HOMES: dict[str, str] = {
    # Engines
    "Chat": "kedge.conversation",
    "ChatReply": "kedge.conversation",
    "Conversation": "kedge.conversation",
    "chain": "kedge.chaining",
    "chain_report": "kedge.chaining",
    "connect": "kedge.providers",
    "mcp_tools": "kedge.mcp",
    "open_store": "kedge.store",
    "Reply": "kedge.engines",
    "TextDelta": "kedge.events",
    "run_sync": "kedge._internal.event_loops",
    "tool": "kedge.tools",
    "unchain": "kedge.chaining",
    "with_middleware": "kedge.middleware",
    # Turns
    "Turn": "kedge.turns",
    "assistant": "kedge.turns",
    "audio": "kedge.turns",
    "diff": "kedge.turns",
    "file": "kedge.turns",
    "image": "kedge.turns",
    "system": "kedge.turns",
    "tool_call": "kedge.turns",
    "tool_result": "kedge.turns",
    "user": "kedge.turns",
    # Errors
    "AnswerIncomplete": "kedge.errors",
    "Blocked": "kedge.errors",
    "CannotConnect": "kedge.errors",
    "ChainRefused": "kedge.errors",
    "EngineError": "kedge.errors",
    "HeadConflict": "kedge.errors",
    "InvalidJSON": "kedge.errors",
    "InvalidSetting": "kedge.errors",
    "InvalidTurn": "kedge.errors",
    "KedgeError": "kedge.errors",
    "NotAuthorized": "kedge.errors",
    "NotInStore": "kedge.errors",
    "OutputInvalid": "kedge.errors",
    "RateLimited": "kedge.errors",
    "RequestRefused": "kedge.errors",
    "ServerFailed": "kedge.errors",
    "StoreError": "kedge.errors",
    "Unreachable": "kedge.errors",
}
"""Every public name, and the module it comes from."""

__all__ = list(HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - the test checks it

if TYPE_CHECKING:
    __version__: str

    from kedge._internal.event_loops import run_sync as run_sync
    from kedge.chaining import chain as chain
    from kedge.chaining import chain_report as chain_report
    from kedge.chaining import unchain as unchain
    from kedge.conversation import Chat as Chat
    from kedge.conversation import ChatReply as ChatReply
    from kedge.conversation import Conversation as Conversation
    from kedge.engines import Reply as Reply
    from kedge.errors import AnswerIncomplete as AnswerIncomplete
    from kedge.errors import Blocked as Blocked
    from kedge.errors import CannotConnect as CannotConnect
    from kedge.errors import ChainRefused as ChainRefused
    from kedge.errors import EngineError as EngineError
    from kedge.errors import HeadConflict as HeadConflict
    from kedge.errors import InvalidJSON as InvalidJSON
    from kedge.errors import InvalidSetting as InvalidSetting
    from kedge.errors import InvalidTurn as InvalidTurn
    from kedge.errors import KedgeError as KedgeError
    from kedge.errors import NotAuthorized as NotAuthorized
    from kedge.errors import NotInStore as NotInStore
    from kedge.errors import OutputInvalid as OutputInvalid
    from kedge.errors import RateLimited as RateLimited
    from kedge.errors import RequestRefused as RequestRefused
    from kedge.errors import ServerFailed as ServerFailed
    from kedge.errors import StoreError as StoreError
    from kedge.errors import Unreachable as Unreachable
    from kedge.events import TextDelta as TextDelta
    from kedge.mcp import mcp_tools as mcp_tools
    from kedge.middleware import with_middleware as with_middleware
    from kedge.providers import connect as connect
    from kedge.store import open_store as open_store
    from kedge.tools import tool as tool
    from kedge.turns import Turn as Turn
    from kedge.turns import assistant as assistant
    from kedge.turns import audio as audio
    from kedge.turns import diff as diff
    from kedge.turns import file as file
    from kedge.turns import image as image
    from kedge.turns import system as system
    from kedge.turns import tool_call as tool_call
    from kedge.turns import tool_result as tool_result
    from kedge.turns import user as user
else:

    def __getattr__(name: str) -> Any:
        """Load a public name on first use, or return the installed version: ``unknown`` if it is not installed."""
        if name == "__version__":
            metadata = import_module("importlib.metadata")
            try:
                return metadata.version("kedge-llm")  # on PyPI, ``kedge`` is another project
            except metadata.PackageNotFoundError:
                return "unknown"
        return import_module("kedge._internal.lazy_names").make_getattr(__name__, HOMES)(name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *HOMES})
