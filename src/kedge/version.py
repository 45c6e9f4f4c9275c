"""The version of the installed package."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "kedge-llm"
"""The name of the package on PyPI, where ``kedge`` is another project."""


@cache
def get_version() -> str:
    """Return the version of the installed package; ``unknown`` for source code that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
