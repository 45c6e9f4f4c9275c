"""Tests of ``forbid_network``, which prevents network connections in tests."""

import socket

import pytest

from kedge.testing import NetworkForbidden, forbid_network


async def test_other_hosts_cannot_be_reached() -> None:
    """Connections to other hosts by name and by address raise ``NetworkForbidden``."""
    with forbid_network():
        with pytest.raises(NetworkForbidden, match="look up"):
            socket.create_connection(("api.openai.com", 443), timeout=1)
        with socket.socket() as probe, pytest.raises(NetworkForbidden, match="reach"):
            probe.connect(("192.0.2.1", 443))
        with socket.socket() as probe, pytest.raises(NetworkForbidden, match="reach"):
            probe.connect_ex(("192.0.2.1", 443))


def test_the_suite_forbids_the_network() -> None:
    """The fixture in tests/conftest.py applies ``forbid_network`` to every test."""
    with pytest.raises(NetworkForbidden):
        socket.getaddrinfo("api.openai.com", 443)
