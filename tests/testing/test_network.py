"""The switch that forbids real network calls."""

import socket

import pytest

from kedge.providers import connect
from kedge.testing import NetworkForbidden, forbid_network, serve
from kedge.turns import Turn, user


async def test_another_machine_cannot_be_reached() -> None:
    """Neither by name nor by address."""
    with forbid_network():
        with pytest.raises(NetworkForbidden, match="look up"):
            socket.create_connection(("api.openai.com", 443), timeout=1)
        with socket.socket() as probe, pytest.raises(NetworkForbidden, match="reach"):
            probe.connect(("192.0.2.1", 443))
        with socket.socket() as probe, pytest.raises(NetworkForbidden, match="reach"):
            probe.connect_ex(("192.0.2.1", 443))


async def test_this_machine_can() -> None:
    """The local server answers as ever."""
    with forbid_network(), serve() as server:
        async with connect(f"responses:{server.base_url}#practice") as engine:
            assert len(await engine.run(Turn([user("Hi")]))) == 2


def test_every_test_of_ours_runs_under_the_switch() -> None:
    """The suite itself forbids the network; see tests/conftest.py."""
    with pytest.raises(NetworkForbidden):
        socket.getaddrinfo("api.openai.com", 443)
