"""A real server for tests, started in-process on a free port in a few milliseconds.

    from kedge.testing import serve

    with serve() as server:
        client = OpenAI(base_url=server.base_url, api_key="any")
        ...
        assert server.requests[-1].context == [...]

With pytest the fixture ``kedge_server`` is available without an import. Nothing here needs pytest.
``forbid_network()`` rejects connections to other machines.
"""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr
from kedge.testing.network import NetworkForbidden, forbid_network

if TYPE_CHECKING:
    from kedge.testing.server import TestServer, serve

__all__ = ["NetworkForbidden", "TestServer", "forbid_network", "serve"]

if not TYPE_CHECKING:
    # pytest imports this package in every run, so the server is loaded on first use.
    _HOMES = dict.fromkeys(("TestServer", "serve"), "kedge.testing.server")
    __getattr__ = make_getattr(__name__, _HOMES)
