"""Misspelled options raise an error; that a type checker reports them is checked by ``make types``."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kedge import KedgeError
from typing_samples import MISSPELLED


@pytest.mark.parametrize("call", MISSPELLED)
async def test_misspelled_options_raise(call: Callable[[], Awaitable[Any]]) -> None:
    """At run time they raise an error with a suggestion, before anything is sent."""
    with pytest.raises(KedgeError, match="did you mean"):
        await call()
