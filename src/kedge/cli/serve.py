"""``kedge serve``: serve the Responses API and the web page, for the built-in model or any other."""

import asyncio
import gc
import ipaddress
import json
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import setting_option
from kedge.cli.store_options import store_practice_responses
from kedge.config import data_dir, mask_url, store_file, store_url

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from kedge.server.settings import Settings
    from kedge.store import TokenRegistry

DAY = 86_400
MEGABYTE = 1_000_000


class _TokenSettings(NamedTuple):
    """The store with named tokens, and whether it has any."""

    store: str
    required: bool


def default_db() -> "Path":
    """Return the default database in the user's data folder."""
    return data_dir() / "server.db"


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@kedge_command("serve", log_level="info")
@setting_option("serve.host")
@setting_option("serve.port")
@setting_option("serve.db", metavar="FILE|URL")
@setting_option("serve.token")
@setting_option("serve.retention_days")
@setting_option("serve.zero_data_retention")
@setting_option("serve.model", metavar="MODEL")
@setting_option("serve.models", metavar="FILE")
@setting_option("serve.pace")
@setting_option("serve.unknown_parameters")
@setting_option("serve.page")
@setting_option("store", metavar="FILE|URL")
@setting_option("serve.keep_bodies")
@setting_option("serve.max_body_mb")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="Inject a fault, such as cut_after_events=3 (docs/faults.md). Repeatable; loopback only.",
)
def command(
    host: str,
    port: int,
    db: str,
    token: str,
    retention_days: float,
    zero_data_retention: bool,
    model: str,
    models: str,
    pace: float,
    unknown_parameters: "Literal['ignore', 'reject', '']",
    page: bool,
    store: str,
    keep_bodies: bool,
    max_body_mb: float,
    faults: tuple[str, ...],
    as_json: bool,
) -> None:
    """Serve the Responses API and a web page. The built-in model needs no key and no network."""
    from kedge.server.access import LOOPBACK_NAMES
    from kedge.server.faults import Faults
    from kedge.server.settings import Limits, Settings

    local = is_loopback(host)
    token_store = find_token_store(store)
    if not local and not token and not token_store:
        raise click.UsageError(
            f"{host} can be reached from other machines, so a token is required: set "
            "--token or KEDGE_SERVER_TOKEN, add one with 'kedge auth add', or serve on 127.0.0.1"
        )
    if not local and faults:
        raise click.UsageError(
            f"{host} can be reached from other machines, so --fault is not allowed: serve on 127.0.0.1"
        )
    model_settings = load_model_settings(model, models, pace)
    settings = Settings(
        db=db or str(default_db()),
        token=token or None,
        retention=retention_days * DAY,
        zero_data_retention=zero_data_retention,
        **model_settings,
        limits=Limits(body_bytes=int(max_body_mb * MEGABYTE)),
        hosts=LOOPBACK_NAMES if local and not token and not token_store else None,
        faults=Faults(faults) if faults else None,
        unknown_parameters=unknown_parameters or None,
    )
    run(
        settings,
        host,
        port,
        as_json=as_json,
        store=store_url(store) if page else "",
        keep_bodies=keep_bodies,
        tokens=store,
        requires_token=bool(token_store),
    )


def find_token_store(address: str) -> str:
    """Return the address of the store if it has named tokens, else an empty text."""
    from kedge.cli.store_options import run_with_store
    from kedge.store import TokenRegistry

    url = store_url(address, create=False)
    file = store_file(url)
    if file and not file.exists():
        return ""
    tokens = run_with_store(lambda store: TokenRegistry(store).list(), address=address)
    return url if tokens else ""


def load_model_settings(model: str, models: str, pace: float) -> dict[str, Any]:
    """Open the model of ``--model``, or the models of the ``--models`` file."""
    from kedge.backends import load_models, open_model

    if models:
        found = load_models(models)
        first = found.default or next(iter(found.models))
        return {
            "model": found.models[first],
            "models": found.models,
            "default": found.default,
        }
    return {"model": open_model(model, pace=pace)}


def run(
    settings: "Settings",
    host: str,
    port: int,
    *,
    as_json: bool,
    store: str = "",
    keep_bodies: bool = False,
    tokens: str = "",
    requires_token: bool = False,
) -> None:
    """Serve until a signal arrives; with a ``store``, also serve the page.

    ``tokens`` is the file or address of the store with named tokens. They are required from the start if
    ``requires_token``, otherwise as soon as there is one.
    """
    from kedge.config.settings import is_chaining_enabled
    from kedge.observe import measure
    from kedge.server.uvicorn_server import bind
    from kedge.tokens import count_text

    with bind(host, port) as listener:
        url = bound_url(listener)

        def announce() -> None:
            # The vocabulary is slow to load: load it before the first request.
            threading.Thread(target=count_text, args=("hello",), daemon=True).start()
            measure("responses_chained_mode_enabled", int(is_chaining_enabled()))
            # Objects created at startup live as long as the process: exclude them from garbage collection.
            gc.collect()
            gc.freeze()
            facts = {"url": url, "base_url": f"{url}/v1", "db": mask_url(settings.db)}
            line = f"Serving {facts['base_url']}, storing responses in {facts['db']}"
            if store:
                facts |= {"page": f"{url}/", "store": mask_url(store)}
                line += f"\nThe page is at {url}/"
            click.echo(json.dumps(facts) if as_json else line)
            sys.stdout.flush()

        callers = _TokenSettings(tokens, requires_token)
        asyncio.run(_serve(settings, listener, announce, store, callers, keep_bodies=keep_bodies))


async def _serve(
    settings: "Settings",
    listener: "socket.socket",
    announce: "Callable[[], None]",
    store: str,
    tokens: _TokenSettings,
    *,
    keep_bodies: bool,
) -> None:
    if not store:
        from kedge.server.app import create_app
        from kedge.server.uvicorn_server import UvicornServer

        async with _open_tokens(tokens) as callers:
            app = create_app(replace(settings, callers=callers))
            await UvicornServer(app, on_started=announce).serve(sockets=[listener])
        return
    from kedge.web.app import PageSettings, open_page_server

    page = PageSettings(store, keep_bodies=keep_bodies, requires_token=tokens.required)
    with store_practice_responses(store):
        async with open_page_server(settings, page, local_url(listener), announce) as server:
            await server.serve(sockets=[listener])


@asynccontextmanager
async def _open_tokens(tokens: _TokenSettings) -> "AsyncGenerator[TokenRegistry | None]":
    """Open the named tokens of a store; None if there is none, and none can be created."""
    from kedge.errors import StoreError
    from kedge.store import TokenRegistry, open_store

    try:
        store = await open_store(store_url(tokens.store))
    except (OSError, StoreError):
        if tokens.required:
            raise
        yield None
        return
    async with store:
        yield TokenRegistry(store, required=tokens.required)


def bound_url(listener: "socket.socket") -> str:
    """Return the address to which a listener is bound."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url(listener: "socket.socket") -> str:
    """Return the address of the listener for clients on this machine."""
    url = bound_url(listener)
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


async def run_uvicorn(app: Any, listener: "socket.socket", **options: Any) -> None:
    """Serve an app on a bound socket until the process is interrupted."""
    import uvicorn

    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, **options)
    await uvicorn.Server(config).serve(sockets=[listener])
