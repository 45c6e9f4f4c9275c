"""Fixtures for the server and the engine, shared with the tests of engines."""

from engines.conftest import engine, server

__all__ = ["engine", "server"]
