"""Tools named on the command line: ``module:function``."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kedge.errors import CannotConnect


def load_tool(path: str) -> Callable[..., Any]:
    """The function at ``module:function``; modules of the current folder count."""
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise CannotConnect(f"a tool is named as module:function, not {path!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise CannotConnect(
            f"cannot import {module_name!r} for the tool {path!r}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CannotConnect(f"{module_name!r} has no function named {function_name!r}")
    return function
