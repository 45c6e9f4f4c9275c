"""The dashboard, drawn when it is asked for and again whenever something happened."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable

from starlette.responses import StreamingResponse

from kedge.analytics import Selection, analyse, analyse_over_time
from kedge.observe import snapshot
from kedge.store.overview import pulse
from kedge.web.desk import Desk
from kedge.web.figures import BUCKETS, RANGES, Counts, figures, tiles
from kedge.web.rendering import render
from kedge.web.views import Choice, Dashboard

TICK = 0.25
"""Seconds between two looks at whether something happened, or the server stops."""
QUIET = 60
"""After how many looks without news something is sent all the same, to see who is still there."""


async def look(desk: Desk, chosen: str) -> Dashboard:
    """The figures of a range that ends now."""
    seen = await beat(desk)
    until = desk.clock()
    since = until - RANGES[chosen][1]
    selection = Selection(since, math.nextafter(until, math.inf))
    found = await analyse(desk.store, selection)
    ranges = tuple(
        Choice(title, f"/dashboard?range={name}", name == chosen)
        for name, (title, _) in RANGES.items()
    )
    if not found.requests.total:
        return Dashboard((), (), ranges, chosen, seen, empty=True)
    buckets, counts = await analyse_over_time(desk.store, selection, buckets=BUCKETS), counted()
    return Dashboard(tiles(found, counts), figures(found, buckets, counts), ranges, chosen, seen)


def counted() -> Counts:
    """What this process counted by itself."""
    seen = snapshot()
    plans = seen.get("responses_anchor_detection_duration_ms", {}).values()
    times, total = sum(each[0] for each in plans), sum(each[1] for each in plans)
    calls = seen.get("tool_call_ids_total", {})
    return Counts(
        total / times / 1000 if times else None,
        {labels[0][1]: int(value) for labels, (_, value) in calls.items()},
    )


async def beat(desk: Desk) -> str:
    """A word that changes whenever something happened."""
    return "-".join(map(str, await pulse(desk.store)))


def stream_figures(
    desk: Desk, chosen: str, seen: str, stopping: Callable[[], bool]
) -> StreamingResponse:
    """Server-sent events with the figures, drawn; ``seen`` is the beat of the page that asks."""
    return StreamingResponse(_figures(desk, chosen, seen, stopping), media_type="text/event-stream")


async def _figures(
    desk: Desk, chosen: str, seen: str, stopping: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    yield b"retry: 1000\n\n"
    quiet = 0
    while not stopping():
        now = await beat(desk)
        quiet = 0 if now != seen else quiet + 1
        if now != seen:
            seen = now
            html = render("figures.html", view=await look(desk, chosen))
            yield b"event: figures\ndata: " + json.dumps(html).encode() + b"\n\n"
        elif quiet % QUIET == 0:
            yield b": still here\n\n"
        await asyncio.sleep(TICK)
