"""Tool results are counted by how they are matched to their calls, equally in all places."""

import time
from types import SimpleNamespace
from typing import Any

from conversation.conftest import Connect
from kedge import Conversation
from kedge.analytics import analyze
from kedge.observe import metrics
from kedge.store import Store
from kedge.testing import TestServer
from kedge.turns import tool_result
from kedge.web.dashboard import build_dashboard
from kedge.web.page_templates import render

OUTCOMES = ("by_id", "by_fallback", "unmatched")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_matched_results_are_counted_equally_everywhere(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The record of a request, the metric, the statistics and the dashboard have the same counts."""
    before = read_metric()
    conversation = await Conversation.create(connected(), store=store, tools=[add])
    await conversation.send("Please call add with a=2 and b=3")
    kedge_server.faults.set("omit_call_id")
    await conversation.send("Please call add with a=3 and b=4")
    kedge_server.faults.clear()
    await conversation.append(tool_result("call_unknown", "5"))
    reply = await conversation.send("Thanks")
    assert [each.results_unmatched for each in reply.requests] == [1]
    rows = await conversation.responses()
    counts = [[getattr(row, f"results_{each}") for each in OUTCOMES] for row in rows]
    assert counts == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    stats = await analyze(store)
    assert [each.count for each in stats.requests.results] == [1, 1, 1]
    after = read_metric()
    assert {each: after.get(each, 0) - before.get(each, 0) for each in OUTCOMES} == dict.fromkeys(
        OUTCOMES, 1
    )
    service: Any = SimpleNamespace(store=store, clock=time.time)
    html = render("figures.html", view=await build_dashboard(service, "1h"))
    for name in ("by id", "by fallback", "unmatched"):
        assert f'<dt title="{name}: 1">{name}</dt>' in html


def read_metric() -> dict[str, float]:
    """Return the counted results by outcome."""
    series = metrics.snapshot().get("tool_results_total", {})
    return {labels[0][1]: value for labels, (_, value) in series.items()}
