"""Replies have the same members everywhere, which are those of stored responses, and results are counted equally."""

import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conversation.conftest import Connect, add
from kedge import Conversation, Turn, user
from kedge.analytics import analyze
from kedge.conversation import Chat, ChatReply
from kedge.engines import Reply
from kedge.errors import InvalidSetting
from kedge.observe import metrics
from kedge.store import RequestRecord, Store
from kedge.testing import TestServer
from kedge.turns import tool_result
from kedge.usage.prices import sum_costs
from kedge.web.dashboard import build_dashboard
from kedge.web.page_templates import render


def price(row: RequestRecord) -> float:
    """Return a cost of one dollar for each token of input."""
    return float(row.input_tokens or 0)


async def ask(kind: str, store: Store, connected: Connect, text: str) -> Reply:
    """Send a message and return the reply."""
    engine = connected(params={"reasoning": {"summary": "auto"}})
    match kind:
        case "engine":
            return await engine.ask(Turn([user(text)]))
        case "chat":
            return await Chat(engine).chat_with_state(None, text)
        case _:
            return await (await Conversation.create(engine, store=store)).send(text)


@pytest.mark.parametrize("kind", ["engine", "chat", "conversation"])
async def test_facts_of_a_reply(store: Store, connected: Connect, kind: str) -> None:
    """Every reply names the model, the status and the reasoning, and has a plan, tokens and a cost."""
    reply = await ask(kind, store, connected, "Think about 6 * 7")
    assert isinstance(reply, Reply)
    assert isinstance(reply, ChatReply) is (kind == "chat")
    assert (reply.model, reply.status, reply.healed) == ("practice", "completed", ())
    assert reply.plan is not None
    assert reply.usage.input_tokens > 0
    assert reply.reasoning
    assert reply.cost is None  # no price is known for this server


async def test_cost_of_a_reply_is_stored(store: Store, connected: Connect) -> None:
    """The cost of all responses of a call is added; a reply that was stored before has that of its response."""
    conversation = await Conversation.create(connected(), store=store, tools=[add], price=price)
    reply = await conversation.send("Please call add with a=2 and b=3", key="sum")
    rows = await conversation.responses()
    assert len(rows) == 2
    assert reply.cost == sum_costs([row.cost for row in rows]) == reply.usage.input_tokens
    assert reply.model == rows[-1].model
    again = await conversation.send("Please call add with a=2 and b=3", key="sum")
    assert (again.stored, again.model, again.cost) == (True, reply.model, rows[-1].cost)


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (lambda row: {}[row.model], None),
        (lambda _: "a dollar", None),
        (lambda _: float("nan"), None),
        (lambda _: Decimal("0.5"), 0.5),
    ],
)
async def test_a_price_that_cannot_be_used_does_not_lose_the_answer(
    price: Any, expected: float | None, store: Store, connected: Connect
) -> None:
    """The answer was paid for: it is stored, with a cost only if the program's function returned a number."""
    conversation = await Conversation.create(connected(), store=store, price=price)
    reply = await conversation.send("Hello")
    (row,) = await conversation.responses()
    assert (reply.cost, row.cost, row.status) == (expected, expected, "completed")
    assert await conversation.pending() == []


@pytest.mark.parametrize("text", [None, "[[prices]]"])
async def test_a_wrong_file_of_prices_is_an_error_before_a_request(
    text: str | None,
    store: Store,
    connected: Connect,
    kedge_server: TestServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is sent or stored: after the answer the error would lose it."""
    file = tmp_path / "prices.toml"
    if text is not None:
        file.write_text(text)
    conversation = await Conversation.create(connected(), store=store)
    before = len(kedge_server.requests)
    monkeypatch.setenv("KEDGE_PRICES", str(file))
    with pytest.raises(InvalidSetting, match=r"prices\.toml"):
        await conversation.send("Hello")
    assert len(kedge_server.requests) == before
    assert await conversation.pending() == []


def test_sum_of_costs_is_known_only_with_every_cost() -> None:
    """A sum without the cost of one response would be too low."""
    assert sum_costs([0.5, 0.25]) == 0.75
    assert sum_costs([0.5, None]) is None
    assert sum_costs([]) is None


OUTCOMES = ("by_id", "by_fallback", "unmatched")


async def test_matched_results_are_counted_equally_everywhere(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The record of a request, the metric, the statistics and the dashboard have the same counts."""
    before = read_metric()
    history = [user("Hello"), tool_result("call_unknown", "5")]
    conversation = await Conversation.create(connected(), store=store, tools=[add], blocks=history)
    reply = await conversation.send("Thanks")
    assert [each.results_unmatched for each in reply.requests] == [1]
    await conversation.send("Please call add with a=2 and b=3")
    kedge_server.faults.set("omit_call_id")
    await conversation.send("Please call add with a=3 and b=4")
    kedge_server.faults.clear()
    rows = await conversation.responses()
    counts = [[getattr(row, f"results_{each}") for each in OUTCOMES] for row in rows]
    assert counts == [[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0]]
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
