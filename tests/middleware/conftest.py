"""The fixture for the engine, shared with the tests of engines."""

from engines.conftest import engine

__all__ = ["engine"]
