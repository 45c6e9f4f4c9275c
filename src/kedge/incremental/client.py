"""`kedge.chain(client)`: send anchors and deltas from a client that replays its history.

The transports of the HTTP client are wrapped, so its connection pools, proxies, authentication, hooks, cookies and
timeouts are unchanged, and nothing is closed twice.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from kedge.errors import InvalidSetting
from kedge.incremental.exchange import Chainer
from kedge.incremental.index import AnchorIndex
from kedge.incremental.report import ChainedRequest, ChainReport
from kedge.incremental.store_index import StoreIndex
from kedge.incremental.transport import ChainedTransport
from kedge.memory.evidence import Trust
from kedge.planning import DEFAULT_RETENTION
from kedge.store import Store

ClientT = TypeVar("ClientT")


def chain(
    client: ClientT,
    *,
    store: Store | str | None = None,
    index: AnchorIndex | None = None,
    retention: float | None = DEFAULT_RETENTION,
    max_depth: int | None = None,
    trust: Trust = "earned",
    on_request: Callable[[ChainedRequest], None] | None = None,
) -> ClientT:
    """Make a client that replays its full history send only the items that the server does not have.

    Each `POST /responses` request of the client is looked up by content. If the context of a stored response
    provably equals a prefix of its input, the request is sent with `previous_response_id` and the rest of
    the input; otherwise it is sent as the program wrote it. If the server no longer has that response, the
    original request is sent instead, before any output is passed to the program.

    Args:
        client: An `OpenAI` or `AsyncOpenAI` client (Azure variants too), or the `httpx2` client that it
            or another library uses. It is changed in place. A client that is chained already gets these
            settings; its report and its index in memory are continued.
        store: Where responses are looked up: a SQLite file, the address of a store (`sqlite:///…` or
            `postgresql://…`), or an open `kedge.Store`. All processes that use it chain on the responses
            of each other. By default responses are stored in this process only.
        index: An index, instead of `store`. Pass the same one to several clients to share it.
        retention: The seconds for which the server stores a response; None if it does not expire.
        max_depth: The number of responses of a chain that the server passes to the model, if it is limited.
        trust: Which servers are chained on: `earned` for those known to use stored context (OpenAI, Azure,
            xAI and `kedge serve`) and those that prove it by their token counts or the items they list,
            `always` for all, `never` for none. Requests to others are sent as the program wrote them.
        on_request: Called with a `ChainedRequest` after each request.

    Returns:
        The same client.

    Raises:
        TypeError: The client cannot be chained, or both `store` and `index` are passed.
        StoreError: The store cannot be opened.
        InvalidSetting: `retention`, `max_depth` or `trust` has an invalid value.

    Example:
        ```python
        client = kedge.chain(OpenAI())
        history = [{"role": "user", "content": "Hello"}]
        response = client.responses.create(model="gpt-5.1", input=history)
        ```
    """
    http_client, library = _get_http_client(client)
    if store is not None and index is not None:
        raise TypeError("kedge.chain accepts a store or an index, not both")
    previous = _find_chainer(http_client)
    opened = None if store is None else StoreIndex(store)
    index = opened or index
    if index is None and previous is not None and previous.opened is None:
        index = previous.index
    try:
        chainer = Chainer(
            index, retention=retention, max_depth=max_depth, trust=trust, on_request=on_request
        )
    except InvalidSetting:
        if opened is not None:
            opened.close()
        raise
    chainer.opened = opened
    if previous is not None:
        chainer.report, chainer.report.on_request = previous.report, on_request
    unchain(client)
    _replace_transports(http_client, lambda each: ChainedTransport(each, chainer, library))
    return client


def unchain(client: ClientT) -> ClientT:
    """Undo `chain`: from now on the client sends requests as the program writes them.

    A store that `chain` opened is closed.

    Args:
        client: A client that was passed to `chain`; any other is not changed.

    Returns:
        The same client.
    """
    http_client, _ = _get_http_client(client)
    chainer = _find_chainer(http_client)
    _replace_transports(
        http_client, lambda each: each.wrapped if isinstance(each, ChainedTransport) else each
    )
    if chainer is not None and chainer.opened is not None:
        chainer.opened.close()
    return client


def chain_report(client: object) -> ChainReport:
    """Return the report of a chained client: what it sent, saved, healed and passed through.

    Args:
        client: A client that was passed to `chain`.

    Returns:
        Totals and the newest requests.

    Raises:
        TypeError: The client is not chained.
    """
    chainer = _find_chainer(_get_http_client(client)[0])
    if chainer is None:
        raise TypeError("this client is not chained; call kedge.chain(client) first")
    return chainer.report.build()


def _get_http_client(client: object) -> tuple[Any, Any]:
    """Return the HTTP client behind an SDK client, or the HTTP client itself, and its library."""
    candidates: tuple[Any, ...] = (client, getattr(client, "_client", None))
    for candidate in candidates:
        for base in candidate.__class__.__mro__:
            root = base.__module__.partition(".")[0]
            if root in ("httpx2", "httpx") and base.__name__ in ("Client", "AsyncClient"):
                return candidate, import_module(root)
    raise TypeError(
        f"kedge.chain accepts an OpenAI client or an httpx2 client, not {type(client).__name__}"
    )


def _find_chainer(http_client: Any) -> Chainer | None:
    transport = http_client._transport  # noqa: SLF001
    return transport.chainer if isinstance(transport, ChainedTransport) else None


def _replace_transports(http_client: Any, replace: Callable[[Any], Any]) -> None:
    """Replace the transport of an HTTP client, and those for some addresses, such as that of a proxy."""
    http_client._transport = replace(http_client._transport)  # noqa: SLF001
    mounts: dict[Any, Any] = http_client._mounts  # noqa: SLF001
    for pattern, transport in mounts.items():
        mounts[pattern] = None if transport is None else replace(transport)
