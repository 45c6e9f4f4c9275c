"""``kedge proxy``: a reverse proxy that makes requests to a Responses server incremental."""

import asyncio
import gc
import json
import sys
from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import setting_option
from kedge.cli.serve import bound_url, is_loopback, run_uvicorn
from kedge.config import data_dir, mask_url, store_url

if TYPE_CHECKING:
    from kedge.engines.evidence import Trust
    from kedge.store import Store

WAIT_SECONDS = 2.0
"""Seconds for which a request waits for a lock or a connection of the store."""


@kedge_command("proxy", log_level="info")
@setting_option("proxy.upstream", metavar="URL")
@setting_option("proxy.host")
@setting_option("proxy.port")
@setting_option("proxy.db", metavar="FILE|URL")
@setting_option("proxy.token")
@setting_option("proxy.trust")
@setting_option("proxy.keep_bodies")
@setting_option("proxy.allow_remote")
def command(
    upstream: str,
    host: str,
    port: int,
    db: str,
    token: str,
    trust: "Trust",
    keep_bodies: bool,
    allow_remote: bool,
    as_json: bool,
) -> None:
    """Forward requests to a Responses server, sending only what is new.

    Point a client's base URL at the proxy. Its POST /responses requests are looked up by content and sent
    with previous_response_id where a stored response provably remembers the start of their input.
    """
    if not upstream.startswith(("http://", "https://")):
        raise click.UsageError(f"--upstream must be an http or https URL, not {mask_url(upstream)}")
    from kedge.proxy import create_proxy_app
    from kedge.server.uvicorn_server import bind

    store = _open_store(db, keep_bodies=keep_bodies)
    requires_token = not is_loopback(host) and not token and not allow_remote
    if requires_token and not _has_tokens(store):
        if store is not None:
            store.database.close()
        raise click.UsageError(
            f"{host} can be reached from other machines: set --token or KEDGE_PROXY_TOKEN, add a token to "
            "the store of --db with 'kedge auth add', listen on 127.0.0.1, or pass --allow-remote if "
            "something in front of the proxy checks who connects"
        )
    app = create_proxy_app(
        upstream,
        store=store,
        trust=trust,
        token=token,
        any_host=allow_remote,
        requires_token=requires_token,
    )
    with bind(host, port) as listener:
        base_url = f"{bound_url(listener)}/v1"
        facts = {"base_url": base_url, "upstream": mask_url(upstream)}
        line = f"Forwarding {base_url} to {facts['upstream']}"
        click.echo(json.dumps(facts) if as_json else line)
        sys.stdout.flush()
        # Objects created at startup live as long as the process: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        # The date of the upstream server is forwarded.
        asyncio.run(run_uvicorn(app, listener, date_header=False, ws="websockets-sansio"))
    if store is not None:
        store.database.close()


def _has_tokens(store: "Store | None") -> bool:
    from kedge.store import TokenRegistry

    return store is not None and bool(asyncio.run(TokenRegistry(store).list()))


def _open_store(address: str, *, keep_bodies: bool) -> "Store | None":
    """Open the store at an address; None for ``:memory:``."""
    from kedge.store import Store
    from kedge.store.open import open_current_database

    if address == ":memory:":
        return None
    if not address:
        data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    url = store_url(address or str(data_dir() / "proxy.db"))
    return Store(open_current_database(url, WAIT_SECONDS), keep_bodies=keep_bodies)
