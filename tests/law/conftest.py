"""The tests of the law use the server and the engine of the engines' tests."""

from engines.conftest import engine, server

__all__ = ["engine", "server"]
