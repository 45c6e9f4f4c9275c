"""``kedge proxy``: a reverse proxy that makes requests to a Responses server incremental."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import setting_option
from kedge.cli.serve import is_loopback
from kedge.config import data_dir, mask_url

if TYPE_CHECKING:
    from kedge.engines.evidence import Trust
    from kedge.incremental import AnchorIndex


@kedge_command(
    "proxy",
    log_level="info",
    short_help="Forward requests to a Responses server, sending only what is new.",
)
@setting_option("proxy.upstream", metavar="URL")
@setting_option("proxy.host")
@setting_option("proxy.port")
@setting_option("proxy.db", metavar="FILE|URL")
@setting_option("proxy.token")
@setting_option("proxy.trust")
@setting_option("proxy.allow_remote")
def command(
    upstream: str,
    host: str,
    port: int,
    db: str,
    token: str,
    trust: "Trust",
    allow_remote: bool,
    as_json: bool,
) -> None:
    """Forward requests to a Responses server, sending only what is new.

    Point a client's base URL at the proxy. Its POST /responses requests are looked up by content and sent
    with previous_response_id where a stored response provably remembers the start of their input.
    """
    if not upstream.startswith(("http://", "https://")):
        raise click.UsageError(f"--upstream must be an http or https URL, not {mask_url(upstream)}")
    if not is_loopback(host) and not token and not allow_remote:
        raise click.UsageError(
            f"{host} can be reached from other machines: set --token or KEDGE_PROXY_TOKEN, listen on "
            "127.0.0.1, or pass --allow-remote if something in front of the proxy checks who connects"
        )
    from kedge.proxy import create_proxy_app
    from kedge.server.uvicorn_server import bind

    app = create_proxy_app(
        upstream, index=_open_index(db), trust=trust, token=token, any_host=allow_remote
    )
    with bind(host, port) as listener:
        address, bound = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        base_url = f"http://{shown}:{bound}/v1"
        facts = {"base_url": base_url, "upstream": mask_url(upstream)}
        line = f"Forwarding {base_url} to {facts['upstream']}"
        click.echo(json.dumps(facts) if as_json else line)
        sys.stdout.flush()
        asyncio.run(_serve(app, listener))


async def _serve(app: Any, listener: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, ws="websockets-sansio"
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _open_index(given: str) -> "AnchorIndex":
    """Open the index at an address, or one in memory for ``:memory:``."""
    from kedge.incremental import MemoryIndex, StoreIndex

    if given == ":memory:":
        return MemoryIndex()
    if not given:
        data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    return StoreIndex(given or str(data_dir() / "proxy.db"))
