"""``kedge mcp``: serve the store as an MCP server, over standard streams or HTTP."""

import asyncio
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import SOURCES_KEY, setting_option
from kedge.cli.base import command as kedge_command
from kedge.cli.serve import bound_url, is_loopback, run_uvicorn
from kedge.cli.store_options import resolve_model, store_option, use_store
from kedge.mcp import require_mcp

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

    from kedge.server.access import AccessPolicy


@kedge_command("mcp")
@setting_option("model")
@store_option
@click.option("--allow-write", is_flag=True, help="Also offer ask and fork.")
@click.option("--http", is_flag=True, help="Serve HTTP instead of the standard streams.")
@setting_option("mcp.host")
@setting_option("mcp.port")
@setting_option("mcp.token")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    store: str,
    allow_write: bool,
    http: bool,
    host: str,
    port: int,
    token: str,
    as_json: bool,
) -> None:
    """Serve the conversations as an MCP server: search, list and show; with --allow-write ask and fork.

    By default it serves one client on standard input and output. The model of ask is the conversation's own, unless
    --model names another.
    """
    require_mcp()
    if http and not is_loopback(host) and not token:
        raise click.UsageError(
            f"{host} can be reached from other machines, so a token is required: set "
            "--token or KEDGE_MCP_TOKEN, or serve on 127.0.0.1"
        )
    requested = model if ctx.meta[SOURCES_KEY]["model"] == "flag" else None
    choose = partial(resolve_model, requested=requested, may_ask=False) if allow_write else None

    async def serve() -> None:
        from kedge.mcp.server import StoreTools, create_mcp_server, serve_stdio
        from kedge.server.access import LOOPBACK_NAMES, AccessPolicy

        async with use_store(store, make=allow_write, connects=allow_write) as opened:
            server = create_mcp_server(StoreTools(opened, choose).to_toolbox())
            if http:
                policy = AccessPolicy(token or None, None if token else LOOPBACK_NAMES)
                await _serve_http(server, policy, host, port, as_json=as_json)
            else:
                await serve_stdio(server)

    asyncio.run(serve())


async def _serve_http(
    server: "Server[Any]", policy: "AccessPolicy", host: str, port: int, *, as_json: bool
) -> None:
    from kedge.mcp.server import create_http_app
    from kedge.server.uvicorn_server import bind

    with bind(host, port) as listener:
        url = f"{bound_url(listener)}/mcp"
        click.echo(json.dumps({"url": url}) if as_json else f"Serving {url}")
        sys.stdout.flush()
        app = create_http_app(server, policy)
        await run_uvicorn(app, listener, lifespan="on", timeout_graceful_shutdown=2)
