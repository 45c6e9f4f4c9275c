"""Shared parts of the commands about conversations: the store, and lookup by name.

A conversation is named by its id, a short form of its id, or its title. Commands that only read do not
create a store.
"""

import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kedge._internal.display import sanitize_text
from kedge._internal.files import ensure_private_file
from kedge.cli.base import default_option, echo_note, get_config, get_setting, setting_option
from kedge.config import data_dir, load_config, mask_url, store_file, store_url
from kedge.errors import KedgeError, NotInStore, UnconfirmedReference

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Node, Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

IN_MEMORY = "sqlite://:memory:"
ID_PREFIX = "conv_"
"""The prefix of the ids of all conversations."""
MIN_PREFIX = 4
"""The minimum number of further characters of an abbreviated id."""
MAX_ROWS = 10**9
"""The maximum of ``--limit`` and ``--offset``, and the limit of commands that read all conversations."""
MAX_NAMED = 5
"""The maximum number of conversations listed in an error about an ambiguous title."""
MAX_COMPLETIONS = 500
"""The maximum number of conversations offered as completions."""
MODEL_HELP = "A model string. A stored conversation continues with its own model by default."
"""The help of ``--model`` for commands that create or continue conversations."""


store_option = setting_option("store", metavar="FILE|ADDRESS", expose_value=False)
"""Adds ``--store``, whose value `use_store` and the functions below read."""


def find_store_url(*, create: bool = False) -> str:
    """Return the address of the command's store; its folder is created if ``create`` is set."""
    return store_url(str(get_setting("store").value), create=create)


_AGE_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhdw])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration, such as ``7d`` or ``90m``."""
    seconds = _parse_age(text)
    if not seconds:
        raise click.BadParameter(f"{text!r} is not a duration; write 90m, 12h, 7d or 4w")
    return seconds


DEFAULT = "default"
"""The value of an option that sets a member of a conversation to its default."""


def parse_optional_duration(text: str) -> float | str:
    """Return the seconds of a duration, or ``DEFAULT``."""
    if text.strip() == DEFAULT:
        return DEFAULT
    return parse_duration(text)


def format_stored_duration(seconds: float | None) -> str:
    """Return a duration as an option accepts it, in the largest unit of which it is a whole number."""
    if seconds is None:
        return DEFAULT
    for unit, length in reversed(_UNIT_SECONDS.items()):
        if seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds}s"


def parse_time(text: str) -> float:
    """Return the time of a date, a date with a time, or an age (``7d``, ``90m``), in seconds since 1970."""
    age = _parse_age(text)
    if age is not None:
        return time.time() - age
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a time; write 2026-11-15, 2026-11-15T12:00, 7d or 12h"
        raise click.BadParameter(message) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _parse_age(text: str) -> float | None:
    match = _AGE_PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    return float(match["number"]) * _UNIT_SECONDS[match["unit"]]


def duration_option(name: str, text: str) -> Callable[[F], F]:
    """Return an option for a duration."""
    return click.option(name, type=parse_duration, metavar="DURATION", help=text)


def optional_duration_option(name: str, text: str) -> Callable[[F], F]:
    """Return an option for a duration or the default."""
    metavar = f"DURATION|{DEFAULT}"
    return click.option(name, type=parse_optional_duration, metavar=metavar, help=text)


def time_options(function: F) -> F:
    """Add ``--since`` and ``--until``."""
    add_since = click.option(
        "--since",
        type=parse_time,
        metavar="TIME",
        help="Start of the range: 2026-11-15 (UTC), or an age such as 7d.",
    )
    add_until = click.option("--until", type=parse_time, metavar="TIME", help="End of the range.")
    return add_since(add_until(function))


def page_options(limit: int) -> Callable[[F], F]:
    """Return the options ``--limit`` and ``--offset``."""

    def add(function: F) -> F:
        add_offset = default_option(
            "--offset", 0, click.IntRange(0, MAX_ROWS), "Number of results to skip."
        )
        add_limit = default_option(
            "--limit", limit, click.IntRange(1, MAX_ROWS), "Maximum number of results."
        )
        return add_limit(add_offset(function))

    return add


def complete_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return titles and ids as completions; none if the store cannot be read."""
    try:
        url = store_url(load_config()["store"], create=False)
        rows = run_with_store(lambda store: store.conversations(limit=MAX_COMPLETIONS), url)
    except KedgeError:
        return []
    names = [name for row in rows for name in (row.title, row.id) if name]
    return [name for name in names if name.startswith(incomplete) and " " not in name]


conversation_argument = click.argument("conversation", shell_complete=complete_names)
"""Adds the argument ``CONVERSATION``: an id, its beginning, or a title."""
conversations_argument = click.argument(
    "conversations", shell_complete=complete_names, nargs=-1, metavar="[CONVERSATION]..."
)
"""Adds the argument ``CONVERSATION``, which may be given several times or not at all."""
at_option = click.option(
    "--at", default="head", help="A node number or a response id.  [default: the head]"
)
"""Adds ``--at``."""
model_option = click.option(
    "--model",
    help="A model string.  [default: the conversation's own, else the configured one]",
)
"""Adds ``--model``, by default the conversation's model."""


def model_data(model: str) -> dict[str, str]:
    """Return the data that records a model string; a string with a password is not recorded."""
    from kedge.conversation.lookup import MODEL_KEY

    if mask_url(model) != model:
        return {}
    return {MODEL_KEY: model}


async def resolve_model(
    store: "Store",
    row: "ConversationRow | None",
    requested: str | None = None,
    *,
    node: int | None = None,
    may_ask: bool = True,
) -> str:
    """Return the model to use: ``requested``, else the conversation's, else the configured one.

    Args:
        store: The store of the conversation.
        row: The conversation; None for a new one.
        requested: The model that the user named.
        node: The node to continue from; by default the head.
        may_ask: Whether the user is asked to confirm an address from the store, which must be
            confirmed before it is used.
    """
    from kedge.conversation.lookup import find_recorded_model

    if requested or row is None:
        return configured_model(requested)
    recorded = find_recorded_model(row, await store.newest_response(row, node))
    if not recorded:
        return configured_model()
    advice = "pass --model with the model to use"
    source = f"the conversation {row.title or row.id}"
    require_confirmed(model_references(recorded), source, advice, may_ask=may_ask)
    return recorded


def configured_model(requested: str | None = None) -> str:
    """Return the model that the user named, else the configured one; its address counts as confirmed."""
    model = requested or get_config()["model"]
    remember(model_references(model))
    return model


@asynccontextmanager
async def use_store(
    url: str = "", *, make: bool = False, connects_models: bool = False, may_miss: bool = False
) -> "AsyncGenerator[Store]":
    """Open the store.

    Args:
        url: The address of the store, instead of the command's.
        make: Whether the store may be created.
        connects_models: Whether models are connected within this block.
        may_miss: Whether a store that does not exist is an empty one, which is not created.
    """
    from kedge.store import open_store

    url = url or find_store_url(create=make)
    file = store_file(url)
    if file and not make and not file.exists():
        if not may_miss:
            raise NotInStore(
                f"there are no conversations yet: {file} does not exist; "
                "'kedge chat --conversation NAME' starts one"
            )
        url = IN_MEMORY
    with ExitStack() as stack:
        if connects_models:
            stack.enter_context(store_practice_responses(url))
        async with open_store(url) as store:
            yield store


def store_practice_responses(address: str) -> AbstractContextManager[None]:
    """Store the practice model's responses in the store, for engines connected in this block."""
    from kedge.providers.practice_memory import store_practice_memory

    return store_practice_memory(address, report=echo_note)


def run_with_store(work: "Callable[[Store], Awaitable[T]]", url: str = "", **options: bool) -> T:
    """Open the store with the options of `use_store`, and run an async function on it."""
    import anyio

    async def run() -> T:
        async with use_store(url, **options) as store:
            return await work(store)

    return anyio.run(run)  # in this thread, which has the context of click


def with_store(**options: bool) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., T]]:
    """Return a decorator that adds ``--store``, and passes the store to an async command; see `use_store`."""

    def wrap(command: Callable[..., Awaitable[T]]) -> Callable[..., T]:
        @store_option
        @wraps(command)
        def run(**arguments: Any) -> T:
            return run_with_store(partial(command, **arguments), "", **options)

        return run

    return wrap


def with_conversation(command: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Add ``CONVERSATION`` and ``--store``, and pass the store and the conversation to an async command."""

    @conversation_argument
    @with_store()
    @wraps(command)
    async def run(store: "Store", conversation: str, **arguments: Any) -> T:
        return await command(store, await find_conversation(store, conversation), **arguments)

    return run


async def find_conversation(store: "Store", name: str) -> "ConversationRow":
    """Return the conversation with this name, or raise ``NotInStore``."""
    row = await lookup_conversation(store, name)
    if row is None:
        raise NotInStore(f"there is no conversation {name!r}; 'kedge conversations' lists them")
    return row


async def find_conversations(store: "Store", names: "Sequence[str]") -> "list[ConversationRow]":
    """Return the conversations with these names, or all if there are none."""
    if names:
        return [await find_conversation(store, name) for name in names]
    return await store.conversations(archived=None, limit=MAX_ROWS)


async def lookup_conversation(store: "Store", name: str) -> "ConversationRow | None":
    """Return the conversation with this id, title or abbreviated id; None if there is none.

    An empty name, such as of an unset variable, does not name a conversation without a title.
    """
    if not name:
        return None
    try:
        return await store.conversation(name)
    except NotInStore:
        pass
    rows = await store.conversations(archived=None, limit=MAX_ROWS)
    titled = [row for row in rows if row.title == name]
    if titled:
        return _choose_by_title(titled)
    matches = [row for row in rows if _matches_id(row.id, name)]
    if not matches:
        return None
    if len(matches) > 1:
        raise NotInStore(f"{len(matches)} conversations match {name!r}; give more of the id")
    return matches[0]


def _matches_id(full_id: str, name: str) -> bool:
    """Return whether a name is the beginning of an id, or its short form such as ``conv_…f1a361``.

    An output that cannot encode the ellipsis shows three points.
    """
    name = name.replace("...", "…")
    if ID_PREFIX.startswith(name) or len(name.removeprefix(ID_PREFIX).strip("…")) < MIN_PREFIX:
        return False
    start, _, end = name.partition("…")
    return full_id.startswith(start) and full_id.endswith(end)


def _choose_by_title(titled: "list[ConversationRow]") -> "ConversationRow":
    """Return the conversation of this title of which the others are forks."""
    ids = {row.id for row in titled}
    originals = [row for row in titled if row.forked_from not in ids]
    if len(originals) > 1:
        listed = ", ".join(row.id for row in originals[:MAX_NAMED])
        raise NotInStore(
            f"{len(originals)} conversations have the title {originals[0].title!r}; use an id: {listed}"
        )
    return originals[0]


async def find_node(store: "Store", row: "ConversationRow", at: str) -> "Node":
    """Find a node by its number, by the id of its response, or as ``head``."""
    from kedge.store.nodes import parse_position

    try:
        return await store.find_node(row, parse_position(at))
    except NotInStore as error:
        raise NotInStore(f"{error}; 'kedge tree' lists them") from None


def confirmations_file() -> Path:
    """Return the path of the list of confirmed references."""
    return data_dir() / "confirmed"


def model_references(*models: str) -> list[str]:
    """Return the addresses in model strings; known providers have none."""
    from kedge.providers import names_address

    named = (model for model in models if names_address(model))
    return [f"model at {model.rpartition('#')[0] or model}" for model in named]


def remember(references: Iterable[str]) -> None:
    """Add references to the list; a list that cannot be written is not an error."""
    new = set(references) - _load()
    if not new:
        return
    path = confirmations_file()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_private_file(path)
        with path.open("a", encoding="utf-8") as file:
            # The first line break ends a line that was cut off.
            file.write("".join(f"\n{json.dumps(reference)}" for reference in sorted(new)) + "\n")


def require_confirmed(
    references: Iterable[str], source: str, advice: str, *, may_ask: bool = True
) -> None:
    """Check that every reference is confirmed; ask on a terminal.

    Args:
        references: The addresses, functions and files that stored data refers to.
        source: The conversation or workflow that refers to them.
        advice: How to confirm them without a terminal.
        may_ask: Whether the user may be asked for confirmation; not while serving.

    Raises:
        UnconfirmedReference: If one of them is not confirmed.
    """
    missing = sorted(set(references) - _load())
    if not missing:
        return
    names = ", ".join(sanitize_text(mask_url(reference)) for reference in missing)
    message = f"{sanitize_text(source)} names what was not used on this machine before: {names}"
    if may_ask and sys.stdin.isatty() and click.confirm(f"{message}\nUse it?", err=True):
        remember(missing)
        return
    raise UnconfirmedReference(f"{message}; {advice}")


def _load() -> set[str]:
    """Return the list; a line that is damaged, such as by a full disk, does not affect the others."""
    references: set[str] = set()
    with suppress(OSError):
        for line in confirmations_file().read_bytes().split(b"\n"):
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, str):
                    references.add(value)
    return references
