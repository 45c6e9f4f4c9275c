"""``kedge stats``: what the store tells about its chains, in numbers and small charts."""

import re
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import anyio
import click

from kedge.analytics import Analytics, Bucket, Selection, analyse, analyse_over_time
from kedge.cli.frame import command as kedge_command
from kedge.cli.frame import setting
from kedge.cli.output import say_json
from kedge.cli.stats_view import show
from kedge.cli.stored import IN_MEMORY, find_conversation
from kedge.config import store_file, store_url
from kedge.store import Store, open_store

_AGO = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Moment(click.ParamType[float]):
    """A time: a day or more exactly, or so long ago (``7d``, ``90m``)."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds since 1970."""
        if isinstance(value, float):
            return value
        if ago := _AGO.fullmatch(value.strip()):
            return time.time() - float(ago["number"]) * _SECONDS[ago["unit"]]
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; write 2026-11-15, 2026-11-15T12:00, 7d or 12h")
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@kedge_command(
    "stats", short_help="What the store tells about its chains, tokens, cost and latency."
)
@click.option("--since", type=Moment(), help="From then on: 2026-11-15 (UTC), or 7d for days ago.")
@click.option("--until", type=Moment(), help="Up to then.")
@click.option("--model", default="", help="Only this model.")
@click.option("--provider", default="", help="Only this provider.")
@click.option("--conversation", default="", help="Only this conversation.")
@click.option(
    "--buckets", default=24, show_default=True, type=click.IntRange(1, 1000), help="Of the charts."
)
@setting("store")
def command(
    *,
    since: float | None,
    until: float | None,
    model: str,
    provider: str,
    conversation: str,
    buckets: int,
    store: str,
    as_json: bool,
) -> None:
    """Tell about chains, fallbacks, tokens, cost and latency, over any range of time."""
    selection = Selection(since, until, model, provider, conversation)

    async def work() -> tuple[Analytics, tuple[Bucket, ...]]:
        async with await open_store(_address(store)) as opened:
            chosen = await _chosen(opened, selection)
            found = await analyse(opened, chosen)
            return found, await analyse_over_time(opened, chosen, buckets=buckets)

    found, pieces = anyio.run(work)
    if as_json:
        say_json({**asdict(found), "over_time": [asdict(each) for each in pieces]})
    else:
        show(found, pieces)


def _address(given: str) -> str:
    """The store's address; one that is not there yet is not made, and has nothing to tell."""
    address = store_url(given, make=False)
    file = store_file(address)
    return address if file is None or file.exists() else IN_MEMORY


async def _chosen(store: Store, selection: Selection) -> Selection:
    """The selection, with the id of the conversation that is meant by a name."""
    if not selection.conversation:
        return selection
    row = await find_conversation(store, selection.conversation)
    return replace(selection, conversation=row.id)
