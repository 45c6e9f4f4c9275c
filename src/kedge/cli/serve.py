"""``kedge serve``, ``proxy`` and ``mcp``: serve the Responses API with its page, an upstream, or the store."""

import asyncio
import gc
import json
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kedge._internal.urls import is_loopback, parse_base_url
from kedge.cli.base import (
    echo,
    get_setting,
    is_json,
    kedge_command,
    repeated_option,
    section_options,
    setting_option,
)
from kedge.cli.store_options import (
    MODEL_HELP,
    find_store_url,
    resolve_model,
    run_with_store,
    store_option,
    store_practice_responses,
    use_store,
)
from kedge.config import data_dir, mask_url, store_file, store_url
from kedge.errors import StoreError
from kedge.evidence.judge import is_chaining_enabled
from kedge.observe import measure
from kedge.server.access import AccessPolicy
from kedge.server.connections import raise_descriptor_limit
from kedge.server.uvicorn_server import LimitedServer, UvicornServer, bind
from kedge.store import Store, TokenRegistry, open_store
from kedge.store.open import open_current_database

if TYPE_CHECKING:
    from kedge.mcp.server import ChooseModel
    from kedge.server.settings import Settings
    from kedge.web.app import PageSettings

SECONDS_PER_DAY = 86_400
BYTES_PER_MEGABYTE = 1_000_000


FAULT_HELP = "Inject a fault on loopback, such as cut_after_events=3 (docs/practice-model.md)."


@kedge_command("serve", log_level="info")
@section_options(
    "serve", db="FILE|ADDRESS", model="MODEL", models="FILE", trusted_proxies="ADDRESSES"
)
@store_option
@repeated_option("--fault", "faults", "SPEC", FAULT_HELP)
def command(
    host: str, port: int, page: bool, keep_bodies: bool, faults: tuple[str, ...], **options: Any
) -> None:
    """Serve the Responses API and a web page. The built-in model needs no key and no network."""
    requires_token = has_named_tokens()
    settings = _build_settings(host, faults, requires_token=requires_token, **options)
    store = store_file(find_store_url())
    if page and store is not None and store.resolve() == Path(settings.db).resolve():
        raise click.UsageError("--db and --store must be different files")
    page_settings: PageSettings | None = None
    if page:
        page_settings = _make_page_settings(keep_bodies, requires_token)
    serve_until_stopped(settings, host, port, page_settings, requires_token=requires_token)


def _make_page_settings(keep_bodies: bool, requires_token: bool) -> "PageSettings":
    from kedge.web.app import PageSettings

    return PageSettings(find_store_url(create=True), keep_bodies, requires_token)


def _build_settings(
    host: str,
    faults: tuple[str, ...],
    *,
    requires_token: bool,
    token: str,
    unknown_parameters: "Literal['ignore', 'reject', '']",
    **options: Any,
) -> "Settings":
    """Return the settings of a server; the remaining options are settings of the same name."""
    from kedge.server.faults import Faults
    from kedge.server.settings import Limits, Settings

    if not is_loopback(host) and not token and not requires_token:
        raise click.UsageError(
            f"{host} can be reached from other machines, so a token is required: set "
            "--token or KEDGE_SERVER_TOKEN, add one with 'kedge auth add', or serve on 127.0.0.1"
        )
    if not is_loopback(host) and faults:
        raise click.UsageError(
            f"{host} can be reached from other machines, so --fault is not allowed: serve on 127.0.0.1"
        )
    model_settings = load_model_settings(
        options.pop("model"), options.pop("models"), options.pop("pace")
    )
    return Settings(
        db=options.pop("db") or str(data_dir() / "server.db"),
        token=token or None,
        retention=options.pop("retention_days") * SECONDS_PER_DAY,
        **model_settings,
        limits=Limits(body_bytes=int(options.pop("max_body_mb") * BYTES_PER_MEGABYTE)),
        faults=Faults(faults) if faults else None,
        unknown_parameters=unknown_parameters or None,
        **options,
    )


def has_named_tokens() -> bool:
    """Return whether the store has named tokens."""
    return bool(run_with_store(lambda store: TokenRegistry(store).list(), may_miss=True))


def load_model_settings(model: str, models: str, pace: float) -> dict[str, Any]:
    """Return the settings of a server for the model of ``--model``, or for the models of the ``--models`` file."""
    from kedge.providers import load_models, open_model

    if not models:
        return {"model": open_model(model, pace=pace)}
    file = load_models(models)
    first = file.default or next(iter(file.models))
    return {"model": file.models[first], "models": file.models, "default": file.default}


def serve_until_stopped(
    settings: "Settings",
    host: str,
    port: int,
    page: "PageSettings | None",
    *,
    requires_token: bool,
) -> None:
    """Serve until a signal arrives, with a page unless ``page`` is None.

    Named tokens are required from the start if the store has any, otherwise as soon as there is one.
    """

    async def serve(listener: socket.socket) -> None:
        announce = partial(_announce_server, settings, bound_url(listener), page)
        async with AsyncExitStack() as stack:
            if page is None:
                server = await _open_api_server(stack, settings, announce, requires_token)
            else:
                server = await _open_page_server(stack, settings, announce, page, listener)
            await server.serve(sockets=[listener])

    with listen(host, port) as listener:
        asyncio.run(serve(listener))


def _announce_server(settings: "Settings", url: str, page: "PageSettings | None") -> None:
    """Say where the server listens, and prepare its first requests."""
    from kedge.usage.tokens import count_text

    # The vocabulary is slow to load: load it before the first request.
    threading.Thread(target=count_text, args=("hello",), daemon=True).start()
    measure("responses_chained_mode_enabled", int(is_chaining_enabled()))
    db = mask_url(settings.db)
    addresses = {"url": url, "base_url": f"{url}/v1", "db": db}
    text = f"Serving {url}/v1, storing responses in {db}"
    if page is not None:
        addresses["page"] = f"{url}/"
        addresses["store"] = mask_url(page.store)
        text += f"\nThe page is at {url}/"
    _announce(addresses, text)
    _prepare_interpreter()


async def _open_api_server(
    stack: AsyncExitStack,
    settings: "Settings",
    announce: Callable[[], None],
    requires_token: bool,
) -> UvicornServer:
    """Open a server without a page."""
    from kedge.server.app import create_app

    registry = await _open_tokens(stack, required=requires_token)
    app = create_app(replace(settings, callers=registry))
    if registry is not None:
        app.state.health.add(registry.check_health)
    return UvicornServer(app, on_started=announce)


async def _open_page_server(
    stack: AsyncExitStack,
    settings: "Settings",
    announce: Callable[[], None],
    page: "PageSettings",
    listener: socket.socket,
) -> UvicornServer:
    """Open a server with a page, whose conversations with the practice model are in its store."""
    from kedge.web.app import open_page_server

    stack.enter_context(store_practice_responses(page.store))
    opening = open_page_server(settings, page, local_url(listener), announce)
    return await stack.enter_async_context(opening)


async def _open_tokens(stack: AsyncExitStack, *, required: bool) -> TokenRegistry | None:
    """Open the named tokens of the store; None if there is no store, and none can be created."""
    try:
        store = await open_store(find_store_url(create=True))
    except (OSError, StoreError):
        if required:
            raise
        return None
    stack.push_async_exit(store)
    return TokenRegistry(store, required=required)


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """Listen inside the block, with as many connections as the system permits."""
    raise_descriptor_limit()
    with bind(host, port) as listener:
        yield listener


def bound_url(listener: socket.socket) -> str:
    """Return the address to which a listener is bound."""
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def local_url(listener: socket.socket) -> str:
    """Return the address of the listener for clients on this machine."""
    url = bound_url(listener)
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


SWITCH_SECONDS = 0.001
"""The time that a thread with a computation keeps the interpreter while the loop of a server waits for it."""


def _announce(addresses: dict[str, str], text: str) -> None:
    """Print where a server listens: the addresses with ``--json``, else the text."""
    if is_json():
        text = json.dumps(addresses)
    echo(text)
    sys.stdout.flush()


def _prepare_interpreter() -> None:
    """Keep the waits of a server's loop short.

    Garbage collection does not visit the objects that were created at the start, and threads with computations
    release the interpreter sooner.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


async def run_uvicorn(app: Any, listener: socket.socket, **options: Any) -> None:
    """Serve an app on a bound socket until a signal arrives."""
    await LimitedServer(app, **options).serve(sockets=[listener])


PROXY_SHUTDOWN_SECONDS = 10
"""Seconds for which the responses of a proxy may finish when it stops, as the responses of a server."""
PROXY_STORE_WAIT_SECONDS = 2.0
"""Seconds for which a request to a proxy waits for a lock or a connection of the store."""


@kedge_command("proxy", log_level="info")
@section_options("proxy", upstream="URL", db="FILE|ADDRESS")
def proxy_command(
    upstream: str,
    host: str,
    port: int,
    db: str,
    keep_bodies: bool,
    allow_remote: bool,
    **options: Any,
) -> None:
    """Forward requests to a Responses server, sending only what is new.

    Point a client's base URL at the proxy. Its POST /responses requests are looked up by content and sent
    with previous_response_id where a stored response provably remembers the start of their input.
    """
    try:
        parse_base_url(upstream)
    except ValueError as error:
        raise click.UsageError(f"--upstream is not a base URL: {error}") from None
    from kedge.chaining.proxy import create_proxy_app
    from kedge.chaining.rewrite import MAX_BODY_BYTES

    store = _open_proxy_store(db, keep_bodies=keep_bodies)
    requires_token = not is_loopback(host) and not options["token"] and not allow_remote
    with ExitStack() as stack:
        if store is not None:
            stack.callback(store.database.close)
        if requires_token:
            _check_proxy_tokens(host, store)
        app = create_proxy_app(
            upstream, store=store, any_host=allow_remote, requires_token=requires_token, **options
        )
        listener = stack.enter_context(listen(host, port))
        base_url = f"{bound_url(listener)}/v1"
        addresses = {"base_url": base_url, "upstream": mask_url(upstream)}
        _announce(addresses, f"Forwarding {base_url} to {mask_url(upstream)}")
        _prepare_interpreter()
        serving = run_uvicorn(
            app,
            listener,
            descriptors_each=2,  # of each connection: one is for the upstream
            ws_max_size=MAX_BODY_BYTES,
            date_header=False,  # the header of the upstream server is forwarded
            timeout_graceful_shutdown=PROXY_SHUTDOWN_SECONDS,
        )
        asyncio.run(serving)


def _check_proxy_tokens(host: str, store: Store | None) -> None:
    """Check that the store has a token, without which nobody could use the proxy."""
    if store is not None and asyncio.run(TokenRegistry(store).list()):
        return
    raise click.UsageError(
        f"{host} can be reached from other machines: set --token or KEDGE_PROXY_TOKEN, add a token to "
        "the store of --db with 'kedge auth add', listen on 127.0.0.1, or pass --allow-remote if "
        "something in front of the proxy checks who connects"
    )


def _open_proxy_store(address: str, *, keep_bodies: bool) -> Store | None:
    """Open the store at an address; None for ``:memory:``."""
    if address == ":memory:":
        return None
    if not address:
        data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    url = store_url(address or str(data_dir() / "proxy.db"))
    return Store(open_current_database(url, PROXY_STORE_WAIT_SECONDS), keep_bodies=keep_bodies)


@kedge_command("mcp", log_level="warning")
@setting_option("model", help=MODEL_HELP)
@store_option
@click.option("--allow-write", is_flag=True, help="Also offer ask and fork.")
@click.option("--http", is_flag=True, help="Serve HTTP instead of the standard streams.")
@section_options("mcp")
def mcp_command(
    model: str, allow_write: bool, http: bool, host: str, port: int, token: str
) -> None:
    """Serve the conversations as an MCP server: search, list and show; with --allow-write ask and fork.

    By default it serves one client on standard input and output. The model of ask is the conversation's own, unless
    --model names another.
    """
    from kedge.mcp.client_tools import require_mcp

    require_mcp()
    if http and not is_loopback(host) and not token:
        raise click.UsageError(
            f"{host} can be reached from other machines, so a token is required: set "
            "--token or KEDGE_MCP_TOKEN, or serve on 127.0.0.1"
        )
    requested: str | None = None
    if get_setting("model").source == "flag":
        requested = model

    async def serve() -> None:
        from kedge.mcp.server import StoreTools, create_http_app, create_mcp_server, serve_stdio

        async with use_store(make=allow_write, connects_models=allow_write) as opened:
            choose_model: ChooseModel | None = None
            if allow_write:
                choose_model = partial(resolve_model, opened, requested=requested, may_ask=False)
            server = create_mcp_server(StoreTools(opened, choose_model).to_toolbox())
            if not http:
                await serve_stdio(server)
                return
            policy = AccessPolicy(token or None)
            app = create_http_app(server, policy)
            with listen(host, port) as listener:
                url = f"{bound_url(listener)}/mcp"
                _announce({"url": url}, f"Serving {url}")
                _prepare_interpreter()
                await run_uvicorn(app, listener, lifespan="on", timeout_graceful_shutdown=2)

    asyncio.run(serve())
