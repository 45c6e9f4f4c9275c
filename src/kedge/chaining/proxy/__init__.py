"""`kedge proxy`: a reverse proxy that makes requests to a Responses server incremental."""

from kedge.chaining.proxy.app import create_proxy_app

__all__ = ["create_proxy_app"]
