"""A proxy in a thread of the tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from app_thread import serve_app
from kedge.proxy import create_proxy_app


@contextmanager
def serve_proxy(upstream: str, **options: Any) -> Iterator[str]:
    """Run a proxy in a thread and yield its base URL."""
    with serve_app(create_proxy_app(upstream, **{"trust": "always", **options})) as url:
        yield url
