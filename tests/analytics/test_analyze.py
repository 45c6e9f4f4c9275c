"""Statistics of the responses in a store."""

import dataclasses
import math
import random
from datetime import date
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from analytics.conftest import ResponseWriter
from kedge.analytics import (
    Branching,
    CacheUse,
    Chains,
    Cost,
    Count,
    Latency,
    Selection,
    Tokens,
    analyze,
    analyze_conversations,
    analyze_over_time,
)
from kedge.conversation import Conversation
from kedge.errors import InvalidSetting
from kedge.store import Store, open_store, response_sums
from kedge.store.records import ResponseStatus
from kedge.store.summaries import list_summaries
from kedge.testing import TestServer
from kedge.usage.prices import Price, Prices


async def create_writer(store: Store, **options: Any) -> ResponseWriter:
    """Create a conversation, and return a writer for its responses."""
    return ResponseWriter(store, await store.create(**options))


async def test_real_conversations_are_counted(store: Store, kedge_server: TestServer) -> None:
    """A chain of three, a fork from its middle and a lost context are counted."""
    engine = f"responses:{kedge_server.base_url}#practice"
    async with await Conversation.create(engine, store=store) as conversation:
        await conversation.send("One")
        second = await conversation.send("Two")
        await conversation.send("Three")
        fork = await conversation.fork(at=second.node)
        await fork.send("Another three")
        kedge_server.forget()
        await conversation.send("Four")
    analytics = await analyze(store)
    requests = analytics.requests  # one was rejected, because the server had lost its context
    assert (requests.total, requests.conversations, requests.chained, requests.full) == (6, 2, 3, 2)
    assert (requests.fallbacks, requests.healed) == ((Count("lost", 1),), (Count("gone", 1),))
    assert (requests.refused, requests.without_id, requests.forgotten) == (1, 0, 0)
    assert {each.name: each.count for each in requests.sends}["refused"] == 1
    # The question was answered, so nothing failed.
    assert (requests.resent, requests.failed, requests.failures) == (1, 0, ())
    assert {each.name for each in requests.statuses} == {"completed", "lost", "refused"}
    assert (requests.success_rate, requests.chained_share) == (1.0, 3 / 5)
    assert analytics.chains.lengths == ((1, 1), (3, 2))
    assert analytics.chains.longest == 3
    assert analytics.chains.mean == pytest.approx(7 / 3)
    assert analytics.branching == Branching(points=1, branches=2, widest=2, forks=1)
    assert analytics.tokens.input > analytics.tokens.output > 0
    (model,) = analytics.models
    assert (model.model, model.requests, model.succeeded) == ("practice", 6, 5)
    assert (model.failed, model.resent, model.success_rate) == (0, 1, 1.0)
    (bucket,) = await analyze_over_time(store, buckets=1)
    assert (bucket.chained, bucket.refused, bucket.resent, bucket.failed) == (3, 1, 1, 0)
    summaries, _ = await list_summaries(store)
    assert [each.failed for each in summaries] == [0, 0]
    assert (await list_summaries(store, show="failed"))[1] == 0
    (refused,) = [each for each in await store.responses() if each.is_refused]
    assert (refused.error_code, refused.is_resent) == ("previous_response_not_found", True)
    assert "not found" in refused.error
    assert model.latency.median is not None


def test_chains_are_counted_by_ranges_of_lengths() -> None:
    """Each range is twice as wide as the one before; the command and the dashboard show the same ranges."""
    chains = Chains(lengths=((1, 3), (2, 1), (3, 2), (4, 1), (7, 1), (40, 1)))
    counts = [(each.name, each.count) for each in chains.bins]
    assert counts == [("1", 3), ("2 to 3", 3), ("4 to 7", 2), ("32 to 63", 1)]
    assert Chains().bins == ()


async def test_failures_are_those_of_lists(store: Store) -> None:
    """Failed requests, by model, conversation and interval, are those that a list of failures contains."""
    for status in get_args(ResponseStatus):
        writer = await create_writer(store, title=status)
        await writer.add_response(status=status)
    found, (bucket,) = await analyze(store), await analyze_over_time(store, buckets=1)
    rows, listed = await list_summaries(store, show="failed")
    assert listed == found.requests.failed == bucket.failed == 4
    assert [model.failed for model in found.models] == [4]
    conversations = await analyze_conversations(store)
    assert {each.title for each in conversations if each.failed} == {
        each.row.title for each in rows
    }


async def test_selection_by_time_and_names(store: Store) -> None:
    """``since`` is included in the range, ``until`` is not; model, provider and conversation select."""
    writer = await create_writer(store)
    other = await create_writer(store)
    for at in (10.0, 20.0, 30.0):
        await writer.add_response(created_at=at)
    await other.add_response(created_at=20.0, provider="xai", model="grok-4")

    async def total(**members: Any) -> int:
        return (await analyze(store, Selection(**members))).requests.total

    assert await total() == 4
    assert await total(since=20.0) == 3
    assert await total(until=20.0) == 1
    assert await total(since=10.0, until=20.0) == 1
    assert await total(model="grok-4") == 1
    assert await total(provider="openai", since=20.0) == 2
    assert await total(conversation=other.row.id) == 1
    assert await total(conversation="nobody") == 0


async def test_latency_per_model(store: Store) -> None:
    """The median and 95th percentile (nearest rank) of successful answers, by model; names may have a slash."""
    writer = await create_writer(store)
    for seconds in range(1, 101):
        await writer.add_response(seconds=float(seconds), first_token_seconds=seconds / 10)
    await writer.add_response(seconds=1000.0, status="failed")
    await writer.add_response(seconds=7.0, provider="my/engine", model="some/model")
    for selection in (Selection(), Selection(conversation=writer.row.id)):
        often, once = (await analyze(store, selection)).models
        assert (often.provider, often.model) == ("openai", "gpt-5.1")
        assert often.latency == Latency(50.5, 95.0, 5.05, 9.5)
        assert often.success_rate == pytest.approx(100 / 101)
        assert (once.provider, once.model) == ("my/engine", "some/model")
        assert once.latency == Latency(7.0, 7.0)


async def test_range_from_before_1970_has_an_end(store: Store) -> None:
    """The sums of all days are not part of a range that starts with a negative time."""
    day = 86_400.0
    for number, seconds in ((1, 2.0), (5, 9.0)):
        writer = await create_writer(store)
        await writer.add_response(created_at=number * day, seconds=seconds)
    found = await analyze(store, Selection(since=-10 * day, until=3 * day))
    assert (found.requests.total, found.requests.conversations) == (1, 1)
    assert found.latency.p95 == 2.0


async def test_tokens_and_cost(store: Store) -> None:
    """A stored cost is used first, then the current price; responses without a price are counted."""
    writer = await create_writer(store)
    tokens = {"input_tokens": 1_000_000, "cached_tokens": 400_000, "output_tokens": 100_000}
    await writer.add_response(**tokens, reasoning_tokens=50_000)
    await writer.add_response(**tokens, cost=5.0)
    await writer.add_response(**tokens, model="nobody-knows")
    await writer.add_response()
    analytics = await analyze(store)
    assert analytics.tokens == Tokens(3_000_000, 1_200_000, 300_000, 50_000)
    assert analytics.tokens.cached_share == 0.4
    assert analytics.cost == Cost(pytest.approx(1.8 + 5.0), 2, 1)  # pyright: ignore[reportArgumentType]
    assert {each.model: each.cost.unpriced for each in analytics.models} == {
        "gpt-5.1": 0,
        "nobody-knows": 1,
    }


async def test_predicted_and_actual_cached_tokens(store: Store) -> None:
    """Predictions are compared only for requests with both values; savings include all requests."""
    writer = await create_writer(store)
    await writer.add_response(
        cached_tokens=900, predicted_cached_tokens=1000, cache_savings=0.25, cache_write_tokens=7
    )
    await writer.add_response(cached_tokens=500, cache_savings=0.5)
    await writer.add_response(predicted_cached_tokens=4000)
    analytics = await analyze(store)
    assert analytics.cache == CacheUse(1, 1000, 900, 7, 0.75)
    assert analytics.cache.accuracy == 0.9
    assert CacheUse().accuracy is None
    intervals = await analyze_over_time(store, buckets=2)
    assert sum(each.cache.predicted for each in intervals) == 1000
    assert sum(each.cache.saved for each in intervals) == 0.75


async def test_chains_end_at_unchained_responses(store: Store) -> None:
    """Two branches of a chain count as two lengths, and equal ids in another scope are separate."""
    writer = await create_writer(store)
    first = await writer.add_response(provider_response_id="a", depth=1)
    await writer.add_response(provider_response_id="b", anchor="a", depth=2)
    await writer.add_response(after=first, provider_response_id="c", anchor="a", depth=2)
    await writer.add_response(provider_response_id="d", anchor="b", depth=3)
    await writer.add_response(provider_response_id="d2", anchor="d", depth=4, scope="elsewhere")
    analytics = await analyze(store)
    assert analytics.chains.lengths == ((2, 1), (3, 1), (4, 1))
    assert analytics.branching.points == 1
    until = await analyze(store, Selection(until=0.0))
    assert until.chains.count == 0


async def test_intervals_sum_to_the_total(store: Store) -> None:
    """Every response is in one interval, empty intervals are included, and sums equal the totals."""
    writer = await create_writer(store)
    for at in range(20):
        counts = {"input_tokens": at, "sent_bytes": at, "saved_bytes": 1}
        await writer.add_response(
            created_at=100.0 + at * at, anchor="x" if at % 2 else "", **counts
        )
    total = await analyze(store)
    ways: list[dict[str, Any]] = [{"buckets": 7}, {"width": 10.0}, {"buckets": 1}]
    for options in ways:
        intervals = await analyze_over_time(store, **options)
        assert sum(each.requests for each in intervals) == 20
        assert sum(each.chained for each in intervals) == total.requests.chained
        assert sum(each.tokens.input for each in intervals) == total.tokens.input
        assert sum(each.cost.dollars for each in intervals) == pytest.approx(total.cost.dollars)
        assert sum(each.saved_bytes for each in intervals) == 20
        assert sum(each.sent_bytes for each in intervals) == total.requests.sent_bytes == 190
        assert all(a.end == pytest.approx(b.start) for a, b in pairwise(intervals))
    intervals = await analyze_over_time(store, Selection(since=0.0, until=100.0), width=25.0)
    starts = [(each.start, each.requests) for each in intervals]
    assert starts == [(0, 0), (25, 0), (50, 0), (75, 0)]


async def test_invalid_intervals_are_rejected(store: Store) -> None:
    """No intervals, intervals of no width, too many intervals and infinite times raise `InvalidSetting`."""
    writer = await create_writer(store)
    await writer.add_response(created_at=1.0)
    await writer.add_response(created_at=1000.0)
    invalid: list[dict[str, Any]] = [{"buckets": 0}, *({"width": w} for w in (0.0, 1e-4, math.inf))]
    for options in invalid:
        with pytest.raises(InvalidSetting):
            await analyze_over_time(store, **options)
    for time in (math.nan, math.inf, -math.inf, 1e30):
        with pytest.raises(InvalidSetting, match="since must be a finite time"):
            Selection(since=time)
        with pytest.raises(InvalidSetting, match="until must be a finite time"):
            Selection(until=time)


DAY = 86_400.0
SELECTIONS = (
    Selection(),
    Selection(since=1.5 * DAY),
    Selection(since=DAY),
    Selection(until=2.25 * DAY),
    Selection(until=0.5 * DAY),
    Selection(since=0.5 * DAY, until=3.5 * DAY),
    Selection(since=1.1 * DAY, until=1.2 * DAY),
    Selection(model="gpt-5-mini"),
    Selection(provider="xai", since=0.75 * DAY),
)


async def check_sums(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the maintained sums equal those computed from all responses, and are valid."""
    results = [await analyze(store, selection) for selection in SELECTIONS]
    with monkeypatch.context() as patch:
        patch.setattr("kedge.store.response_sums.has_pending", lambda _: True)
        assert results == [await analyze(store, selection) for selection in SELECTIONS]
    assert await store.database.read(response_sums.check_sums) == []


async def add_random_response(writer: ResponseWriter, rng: random.Random, known: list[str]) -> None:
    """Add a random response within four days, chained on a known response or on none."""
    anchor = rng.choice([*known, ""]) if known else ""
    provider, model = rng.choice([("openai", "gpt-5.1"), ("openai", "gpt-5-mini"), ("xai", "x")])
    name = f"resp_{rng.getrandbits(40):x}"
    known.append(name)
    tokens = rng.choice([None, 100])
    await writer.add_response(
        provider=provider,
        model=model,
        provider_response_id=name,
        anchor=anchor,
        created_at=rng.randrange(4 * 24) * 3600.0,
        depth=rng.randrange(1, 4),
        status=rng.choice(["completed", "completed", "failed", "lost", "refused"]),
        reason="" if anchor else rng.choice(["new", "changed", "expired"]),
        healed=rng.choice(["", "", "gone", "forgot"]),
        seconds=rng.randrange(1, 200) / 10,
        first_token_seconds=rng.choice([None, 0.5]),
        input_tokens=tokens,
        cached_tokens=tokens and rng.choice([None, 40]),
        output_tokens=tokens and 10,
        cost=rng.choice([None, 0.25]),
        predicted_cached_tokens=rng.choice([None, 30]),
        cache_savings=rng.choice([None, 0.125]),
        digest=f"sha256:{rng.getrandbits(256):064x}",
        block_count=1,
    )


async def test_sums_match_the_responses(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums stay exact after additions in batches, forks, deletions, lost responses and imports."""
    monkeypatch.setattr("kedge.store.response_sums.BATCH_SIZE", 5)
    rng = random.Random(18)
    writers = [await create_writer(store) for _ in range(3)]
    known: list[str] = []
    for step in range(60):
        await add_random_response(rng.choice(writers), rng, known)
        if step % 15 == 7:
            row = await store.conversation(rng.choice(writers).row.id)
            path = await store.path(row)
            fork = ResponseWriter(store, await store.fork(row, rng.choice(path).id))
            await add_random_response(fork, rng, known)
            writers.append(fork)
        if step % 20 == 11:
            lost = next(each for each in await store.responses() if each.status == "completed")
            assert lost.anchor_record
            assert await store.mark_lost(lost.anchor_record, "gone")
        if step % 20 == 19:
            writer = writers.pop(rng.randrange(len(writers)))
            exported = await store.export(await store.conversation(writer.row.id))
            await store.delete(writer.row.id)
            monkeypatch.setattr("kedge.store.import_export.check_tree", lambda *_: [])
            (row,) = await store.import_(exported)
            writers.append(ResponseWriter(store, row))
            await check_sums(store, monkeypatch)
    row = await store.conversation(writers[-1].row.id)
    assert len(await store.import_(await store.export(row))) == 1
    await check_sums(store, monkeypatch)
    for writer in writers[:2]:
        await store.delete(writer.row.id)
    await check_sums(store, monkeypatch)


async def test_damaged_sums_are_found_and_repaired(store: Store) -> None:
    """`verify` reports sums that do not match the responses, and `gc` recomputes them."""
    writer = await create_writer(store)
    await writer.add_response(input_tokens=10, output_tokens=1)
    await writer.add_response(anchor="resp_x", depth=2)
    before, damage = await analyze(store), "UPDATE {} SET responses = 9"
    for table in ("response_sums", "conversation_sums", "latency_counts", "chain_links"):
        await store.database.write(lambda tx, t=table: tx.run(damage.format(t)))
    assert {each.where for each in await store.verify()} == {
        "response_sums", "conversation_sums", "latency_counts", "chain_links",
    }  # fmt: skip
    await store.gc()
    assert await store.verify() == []
    assert await analyze(store) == before


async def test_read_only_store_is_analyzed(tmp_path: Path) -> None:
    """In a read-only store, responses that are not in the sums are read individually."""
    path = tmp_path / "store.db"
    async with open_store(f"sqlite:///{path}") as store:
        writer = await create_writer(store)
        await writer.add_response(seconds=2.0)
    async with open_store(f"sqlite:///{path}?mode=ro") as store:
        analytics = await analyze(store)
        assert (analytics.requests.total, analytics.latency.median) == (1, 2.0)
        assert [model.model for model in analytics.models] == ["gpt-5.1"]


async def test_prices_are_those_of_each_response(store: Store) -> None:
    """A price depends on the size of a request, not on the sum of requests, and on its day."""
    writer = await create_writer(store)
    for tokens in (150_000, 150_000, 300_000):
        await writer.add_response(model="m", input_tokens=tokens, output_tokens=0)
    base = Price(("openai",), "m", input=1.0, output=1.0)
    prices = Prices(((base, dataclasses.replace(base, above=200_000, input=10.0)),))
    assert (await analyze(store, prices=prices)).cost == Cost(3.3, 3)
    assert (await analyze(store, prices=Prices(((base,),)))).cost == Cost(0.6, 3)
    later = dataclasses.replace(base, since=date(1970, 2, 1), input=10.0)
    await writer.add_response(model="m", input_tokens=100_000, created_at=40 * 86_400.0)
    assert (await analyze(store, prices=Prices(((later, base),)))).cost == Cost(1.6, 4)


@pytest.mark.parametrize("named", [500, 0])
async def test_conversations_sum_to_the_totals(
    store: Store, monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    """Conversations are listed by number of requests, within the selection and the limit."""
    module = import_module("kedge.analytics.queries")
    monkeypatch.setattr(module, "MAX_NAMED_ROWS", named)
    assert await analyze_conversations(store) == ()
    writers = [await create_writer(store, title=f"number {number}") for number in (1, 2, 3)]
    for number, writer in enumerate(writers, 1):
        for _ in range(number):
            await writer.add_response(created_at=5.0, input_tokens=number, cost=0.5, saved_bytes=7)
    await writers[-1].add_response(created_at=50.0, status="refused")
    total = await analyze(store, Selection(until=10.0))
    rows = await analyze_conversations(store, Selection(until=10.0))
    assert [each.title for each in rows] == ["number 3", "number 2", "number 1"]
    assert sum(each.requests for each in rows) == total.requests.total == 6
    assert sum(each.tokens.input for each in rows) == total.tokens.input
    assert sum(each.cost.dollars for each in rows) == total.cost.dollars == 3.0
    assert sum(each.saved_bytes for each in rows) == total.requests.saved_bytes
    (longest,) = await analyze_conversations(store, limit=1)
    assert (longest.title, longest.requests, longest.succeeded) == ("number 3", 4, 3)
