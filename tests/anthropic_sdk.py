"""Clients of the anthropic package, which is imported when the first is made: that takes seconds in each worker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anthropic import Anthropic


def make_anthropic(url: str) -> "Anthropic":
    """Return a client without retries, which the test closes."""
    import anthropic

    # A client that a test does not close fails every time, not only when its socket is collected first.
    wrapper = anthropic._base_client.SyncHttpxClientWrapper
    if hasattr(wrapper, "__del__"):
        del wrapper.__del__
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=300.0)
