"""A real server for tests, started in-process on a free port in a few milliseconds.

    from kedge.testing import serve

    with serve() as server:
        client = OpenAI(base_url=server.base_url, api_key="any")
        ...
        assert server.requests[-1].context == [...]

With pytest the fixture ``kedge_server`` is available without an import. Nothing here needs pytest.
``forbid_network()`` rejects connections to other machines.
"""

from typing import TYPE_CHECKING, Any

from kedge.testing.network import NetworkForbidden, forbid_network

if TYPE_CHECKING:
    from kedge.testing.server import TestServer, serve

__all__ = ["NetworkForbidden", "TestServer", "forbid_network", "serve"]

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import the server on first use: pytest imports this package in every run."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kedge.testing import server

        return getattr(server, name)
