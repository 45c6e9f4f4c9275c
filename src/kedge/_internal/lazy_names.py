"""Names of a package that load their module when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the function ``__getattr__`` of a package.

    Args:
        package: The name of the package.
        homes: The module of each name.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    load.__name__ = "__getattr__"
    return load
