"""Reads what every part of Kedge says about the requests of a run, and compares it with the wire."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import unescape
from typing import Any, Self

import httpx2
from click import unstyle
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kedge import Conversation, connect
from kedge._internal.display import format_size, pluralize, shorten_id
from kedge.analytics import analyze
from kedge.cli.show import load_tree, render_tree
from kedge.engines import Reply
from kedge.engines.request_body import encode_body
from kedge.errors import EngineError
from kedge.events import Event, Usage
from kedge.events.run import AnswerFinished, RequestPlanned, RequestSent
from kedge.middleware import trace
from kedge.observe import snapshot
from kedge.observe.logs import get_fields
from kedge.planning import RequestPlan
from kedge.planning.explain import describe_full_send
from kedge.planning.plan import is_fallback_reason
from kedge.presentation.wording import HEALING_TEXTS
from kedge.server.request_log import RecordedRequest
from kedge.store import RequestRecord, Store
from kedge.store.summaries import load_exchanges
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService

PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
Facts = dict[str, Any]
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
PLAN_FACTS = ("mode", "anchor", "reason", "sent_blocks", "full_blocks")
"""What is known of a request before it is sent."""
SPAN_FACTS = {
    "mode": "kedge.mode",
    "anchor": "kedge.anchor.id",
    "sent_blocks": "kedge.delta.blocks",
    "full_blocks": "kedge.full.blocks",
    "sent_bytes": "kedge.sent.bytes",
    "full_bytes": "kedge.full.bytes",
    "input_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "response_id": "gen_ai.response.id",
}
"""The attribute of a span with each fact."""


@dataclass(slots=True)
class RecordStats:
    """The results of a campaign."""

    requests: int = 0
    chained: int = 0
    healed: int = 0
    failed: int = 0
    background: int = 0
    """The number of answers that were fetched in another run than the one that sent the request."""
    plans: int = 0
    """The number of dry runs that were compared with a request."""
    differences: int = 0
    first_difference: str = ""

    def report(self, difference: str) -> None:
        """Count a difference, and retain the first one."""
        self.differences += 1
        self.first_difference = self.first_difference or difference


def is_create_request(request: RecordedRequest) -> bool:
    """Return whether a request asks for an answer."""
    return request.method == "POST" and request.path in PATHS


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: its events, and its reply or its error; without both, it was stopped."""

    conversation: Conversation
    events: Sequence[Event]
    reply: Reply[Any] | None
    error: EngineError | None
    plan: RequestPlan | None
    """The dry run before it, if there was one."""
    inspection: Facts | None = None
    """What ``kedge inspect`` said about the plan before it, if it can."""


class RequestViews:
    """All views of the requests in a store, and the differences that were found between them."""

    def __init__(self, store: Store, servers: Sequence[TestServer], stats: RecordStats) -> None:
        self.store, self.servers, self.stats = store, servers, stats
        self._spans = InMemorySpanExporter()
        self._tracing = TracerProvider()
        self._tracing.add_span_processor(SimpleSpanProcessor(self._spans))
        self.trace = trace(self._tracing.get_tracer("law"))
        self._logs = LogCollector()
        self._positions = [0] * len(servers)
        self._metrics: Mapping[str, Any] = {}
        self._known: set[int] = set()
        self._running: dict[str, RecordedRequest] = {}
        """The request of each response that is generated in the background."""
        self._history: list[str] = []

    def __enter__(self) -> Self:
        logger = logging.getLogger("kedge")
        self._level = logger.level
        logger.addHandler(self._logs)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("kedge")
        logger.removeHandler(self._logs)
        logger.setLevel(self._level)
        self._tracing.shutdown()

    def start(self) -> None:
        """Forget what earlier runs said."""
        self._positions = [len(server.requests) for server in self.servers]
        self._spans.clear()
        self._logs.records.clear()
        self._metrics = snapshot()

    async def compare(self, result: RunResult) -> None:
        """Compare what every place says about the requests of a run."""
        wire = self._list_wire()
        row = result.conversation.row
        rows = [each for each in await self.store.responses() if each.node not in self._known]
        self._known |= {each.node for each in rows}
        self.stats.requests += len(wire)
        self.stats.failed += result.error is not None
        fetched = [each for each in rows if each.provider_response_id in self._running]
        sent = [each for each in rows if each not in fetched]
        records = [describe_row(each) for each in sent]
        self._compare_lists("wire", [describe_wire(each) for each in wire], records)
        self._compare_lists("events", list_sent(result.events), records)
        self._compare_lists("spans", self._list_spans("chat"), records)
        answers = [describe_row(each) for each in fetched if each.status != "running"]
        spans = [each for each in self._list_spans("fetch_response") if not each["is_error"]]
        self._compare_lists("spans of answers", spans, answers)
        ended = [describe_row(each) for each in rows if each.status != "running"]
        self._compare_lists("log", self._logs.records, ended)
        for raw, each in zip(wire, sent, strict=False):
            await self._compare_bodies(raw, each)
        for each in fetched:
            await self._compare_bodies(self._running[each.provider_response_id], each)
        pairs = zip(wire, sent, strict=False)
        self._running |= {b.provider_response_id: a for a, b in pairs if b.status == "running"}
        self.stats.background += len(fetched)
        self.stats.chained += sum(bool(each["anchor"]) for each in records)
        self.stats.healed += sum(bool(each["healed"]) for each in records)
        self._compare_reply(result, rows)
        self._compare_plan(result, records)
        self._compare_metrics(sent, rows)
        await self._compare_commands(result, rows)
        await self._compare_api(row.id, rows)

    def _list_wire(self) -> list[RecordedRequest]:
        pairs = zip(self.servers, self._positions, strict=True)
        requests = [each for server, start in pairs for each in server.requests[start:]]
        return list(filter(is_create_request, requests))

    def _list_spans(self, operation: str) -> list[Facts]:
        finished = self._spans.get_finished_spans()
        spans = [each for each in finished if each.name.startswith(operation)]
        spans.sort(key=lambda each: each.start_time or 0)
        found: list[Facts] = []
        for span in spans:
            attributes: Mapping[str, Any] = span.attributes or {}
            facts = {name: attributes.get(key) for name, key in SPAN_FACTS.items()}
            texts = {name: facts[name] or "" for name in ("anchor", "response_id")}
            fallback = attributes.get("kedge.fallback.reason", "")
            is_error = not span.status.is_ok
            found.append({**facts, **texts, "fallback": fallback, "is_error": is_error})
        return found

    def _compare_lists(self, place: str, found: Sequence[Facts], records: Sequence[Facts]) -> None:
        if len(found) != len(records):
            short = [(each["anchor"][-4:], each["status"], each["healed"]) for each in records]
            self._report(place, f"{len(found)} requests", f"{len(records)} records {short}")
        for each, record in zip(found, records, strict=False):
            self._compare(place, each, record)

    def _compare(self, place: str, found: Facts, record: Facts) -> None:
        for name, value in found.items():
            if name == "status" and value == "lost":
                value = "completed"  # noqa: PLW2901 - the server lost the answer later
            if name in record and value != record[name]:
                what = f"{record['status']} {record['mode']} healed={record['healed']!r}"
                self._report(f"{place} {name} ({what})", value, record[name])

    def _report(self, place: str, found: object, expected: object) -> None:
        text = f"{place}: {found!r}, not {expected!r}"
        self._history.append(text)
        self.stats.report(text)

    @property
    def differences(self) -> Sequence[str]:
        """The differences so far."""
        return self._history

    async def _compare_bodies(self, raw: RecordedRequest, row: RequestRecord) -> None:
        """Compare the stored bodies of a request with those on the wire, and the usage with the reply."""
        exchanges = await load_exchanges(self.store, row.node)
        content = encode_like_engine(raw)
        if content not in [each.request for each in exchanges]:
            self._report("stored body", [each.request for each in exchanges], content)
        for each in exchanges[-1:]:
            usage = _find_usage(each.reply)
            if usage is not None and row.status in ("completed", "lost"):
                self._compare("reply body", usage, describe_row(row))

    def _compare_reply(self, result: RunResult, rows: Sequence[RequestRecord]) -> None:
        reply = result.reply
        if reply is None or not rows:
            return
        record = describe_row(rows[-1])
        usage = Usage()
        for row in rows:
            usage += _read_usage(row)
        facts = {"response_id": reply.response_id, "model": reply.model, "status": reply.status}
        self._compare("reply", facts, record)
        found = structs.asdict(reply.usage)
        self._compare_values("reply usage", {n: found[n] for n in TOKENS}, structs.asdict(usage))
        healed = tuple(row.healed for row in rows if row.healed)
        self._compare_values("reply", {"healed": reply.healed}, {"healed": healed})
        if reply.plan is not None:
            self._compare("reply.plan", _describe_plan(reply.plan), record)

    def _compare_values(self, place: str, found: Facts, expected: Facts) -> None:
        for name, value in found.items():
            if value != expected[name]:
                self._report(f"{place} {name}", value, expected[name])

    def _compare_plan(self, result: RunResult, records: Sequence[Facts]) -> None:
        """Compare a dry run with the first request; a conditional one may differ."""
        if result.plan is None or result.plan.conditional or not records:
            return
        planned = [each for each in result.events if isinstance(each, RequestPlanned)]
        if planned and planned[0].plan.source != result.plan.source:
            return  # the run compacted or repaired the conversation first
        self.stats.plans += 1
        found = _describe_plan(result.plan)
        # The id of a new object is not known.
        if result.plan.anchor or result.plan.mode != "conversation":
            found["sent_bytes"], found["full_bytes"] = result.plan.sizes
        self._compare("dry run", found, records[0])
        if result.inspection is not None and not result.inspection["conditional"]:
            facts = {name: result.inspection[name] for name in PLAN_FACTS}
            self._compare("inspect", facts, records[0])

    def _compare_metrics(
        self, sent: Sequence[RequestRecord], rows: Sequence[RequestRecord]
    ) -> None:
        """Compare the growth of the counters with the sums over the records: sent ones, and all for the tokens."""
        grown = subtract(snapshot(), self._metrics)
        sums: Counter[tuple[str, str]] = Counter()
        for row in sent:
            kind = "chained" if row.anchor else "stateless"
            if row.status == "refused":
                kind = "refused"
            sums[f"responses_{kind}_requests_total", ""] += 1
            if is_fallback_reason(row.reason):
                sums["responses_fallback_total", row.reason] += 1
            if row.healed:
                sums["responses_healed_total", row.healed] += 1
            sums["responses_bytes_sent_total", ""] += row.sent_bytes
            sums["responses_bytes_full_total", ""] += row.full_bytes
            sums["responses_delta_blocks_count", ""] += row.sent_blocks
        for row in rows:
            for kind in ("input", "cached", "output"):
                sums["tokens_total", kind] += getattr(row, f"{kind}_tokens") or 0
        names = {f"responses_{kind}_requests_total" for kind in ("chained", "stateless", "refused")}
        names |= {name for name, _ in sums}
        for name, label in sums.keys() | {key for key in grown if key[0] in names}:
            if grown[name, label] != sums[name, label]:
                expected = f"{sums[name, label]} of {[(each.status, each.error) for each in rows]}"
                self._report(f"metric {name} {label}", grown[name, label], expected)

    async def _compare_commands(self, result: RunResult, rows: Sequence[RequestRecord]) -> None:
        """Compare the output of ``kedge tree``, ``inspect`` and ``stats``."""
        row = await self.store.conversation(result.conversation.id)
        tree = await load_tree(self.store, row)
        now = self.store.clock()
        nodes = {each["node"]: each for each in tree.to_json(now)["nodes"]}
        lines = [unstyle(line) for line in render_tree(tree, now)]
        for each in rows:
            record = describe_row(each)
            self._compare("tree --json", _describe_shape(nodes[each.node]["response"]), record)
            kind = "resent" if each.is_resent else nodes[each.node]["kind"]
            label = f" {each.node} {kind} "
            (line,) = (line for line in lines if label in line)
            self._compare_texts("tree", line, _list_tree_texts(each))
        found = await analyze(self.store)
        all_rows = await self.store.responses()
        sums = {
            "total": len(all_rows),
            "chained": sum(bool(each.anchor) for each in all_rows if each.status != "refused"),
            "refused": sum(each.status == "refused" for each in all_rows),
            "resent": sum(each.is_resent for each in all_rows),
            "failed": sum(is_failed(each) for each in all_rows),
            "sent_bytes": sum(each.sent_bytes for each in all_rows),
            "saved_bytes": sum(each.full_bytes - each.sent_bytes for each in all_rows),
            "sent_blocks": sum(each.sent_blocks for each in all_rows),
            "saved_blocks": sum(each.saved_blocks for each in all_rows),
        }
        stats = asdict(found.requests)
        self._compare_values("stats", {name: stats[name] for name in sums}, sums)
        reasons = [each.reason for each in all_rows if is_fallback_reason(each.reason)]
        counts = {"fallbacks": reasons, "statuses": [each.status for each in all_rows]}
        for kind, names in counts.items():
            counted = {each.name: each.count for each in getattr(found.requests, kind)}
            self._compare_values("stats", {kind: counted}, {kind: dict(Counter(names))})
        tokens = {"input": sum(each.input_tokens or 0 for each in all_rows)}
        self._compare_values("stats tokens", {"input": found.tokens.input}, tokens)

    async def _compare_api(self, name: str, rows: Sequence[RequestRecord]) -> None:
        """Compare the API of the page: the chain, and the plan of each request."""
        async with connect("practice") as engine:
            models = ModelSelector(engine, ("practice",))
            service = ConversationService(self.store, models, clock=self.store.clock)
            transport = httpx2.ASGITransport(create_page(service))
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as page:
                chain = (await page.get(f"/api/conversations/{name}/tree")).json()
                nodes = {each["node"]: each["response"] for each in chain["nodes"]}
                for row in rows:
                    record = describe_row(row)
                    if row.node not in nodes:
                        self._report("API chain", sorted(nodes), row.node)
                        continue
                    self._compare("API chain", _describe_shape(nodes[row.node]), record)
                    plan = await page.get(f"/api/conversations/{name}/plans/{row.node}")
                    self._compare("API plan", _describe_plan_shape(plan.json()), record)
                    html = (await page.get(f"/conversations/{name}/plans/{row.node}")).text
                    self._compare_texts("card", unescape(html), _list_card_texts(row))

    def _compare_texts(self, place: str, text: str, expected: Mapping[str, bool]) -> None:
        """Compare a text with the texts that it must contain, or must not contain."""
        for part, is_there in expected.items():
            if (part in text) is not is_there:
                self._report(place, text, f"{'with' if is_there else 'without'} {part!r}")


class LogCollector(logging.Handler):
    """Collects the fields of the log records of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Facts] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the fields of a log record."""
        fields = get_fields(record)
        if "sent_bytes" in fields:
            self.records.append({"message": record.getMessage(), **fields})


def is_failed(row: RequestRecord) -> bool:
    """Return whether a question failed with this request; one that may still be answered has not."""
    not_failed = ("completed", "lost", "running", "unknown", "cancelled")
    return row.status not in not_failed and not row.is_resent


def describe_row(row: RequestRecord) -> Facts:
    """Return what the stored row of a request says about it."""
    return {
        "mode": row.mode,
        "anchor": row.anchor,
        "reason": row.reason,
        "fallback": row.reason if is_fallback_reason(row.reason) else "",
        "healed": row.healed,
        "sent_blocks": row.sent_blocks,
        "full_blocks": row.sent_blocks + row.saved_blocks,
        "sent_bytes": row.sent_bytes,
        "full_bytes": row.full_bytes,
        **{name: getattr(row, name) for name in TOKENS},
        "response_id": row.provider_response_id,
        "model": row.model,
        "status": "completed" if row.status == "lost" else row.status,
        "is_error": row.status not in ("completed", "lost", "running"),
    }


def _list_tree_texts(row: RequestRecord) -> dict[str, bool]:
    """Return what the line of a request in ``kedge tree`` must contain, or must not contain."""
    is_full = is_fallback_reason(row.reason) and not row.healed
    texts = {
        f"{format_size(row.sent_bytes)} sent": True,
        f"[sent in full: {row.reason}]": is_full,
        "[sent in full": is_full,
        shorten_id(row.provider_response_id): True,
    }
    return texts | ({f"[{HEALING_TEXTS[row.healed]}]": True} if row.healed else {})


def _list_card_texts(row: RequestRecord) -> dict[str, bool]:
    """Return what the card of a request must contain, or must not contain."""
    sent = f"{pluralize(row.sent_blocks, 'block')}, {format_size(row.sent_bytes)}"
    reason = describe_full_send(row.mode, row.reason, has_candidates=bool(row.rejected))
    return {
        f"Chained on {row.anchor}: sent {sent}.": bool(row.anchor) and not row.is_refused,
        f"Sent in full ({sent}): {reason}.": not row.anchor and not row.is_refused,
        f"Refused by the server: a request of {sent}": row.is_refused,
        "It was sent again in another request.": row.is_resent,
        f"{format_size(row.sent_bytes)} instead of {format_size(row.full_bytes)}": (
            row.sent_bytes != row.full_bytes
        ),
        **{each.response_id: True for each in row.rejected},
    }


def encode_like_engine(request: RecordedRequest) -> bytes:
    """Return the bytes of a request; an SDK, and the server for a WebSocket, encode the same JSON differently."""
    if request.transport == "websocket":
        return encode_body(
            {name: request.body[name] for name in request.body if name not in ("type", "stream")}
        )
    is_sdk = "openai/python" in request.headers.get("user-agent", "").lower()
    return encode_body(request.body) if is_sdk else request.raw


def describe_wire(request: RecordedRequest) -> Facts:
    """Return what a request on the wire is."""
    body = request.body if isinstance(request.body, dict) else {}
    facts: Facts = {"sent_bytes": len(encode_like_engine(request))}
    if request.path == "/v1/responses":
        if not body.get("conversation"):
            facts["anchor"] = body.get("previous_response_id", "")
        facts["sent_blocks"] = len(body.get("input", ()))
    return facts


def list_sent(events: Sequence[Event]) -> list[Facts]:
    """Return what the events say about each request that was sent."""
    found: list[Facts] = []
    plan: Facts = {}
    for event in events:
        match event:
            case RequestPlanned():
                plan = {} if event.running else _describe_plan(event.plan)
            case RequestSent():
                found.append(
                    {**plan, "sent_bytes": event.body_bytes, "full_bytes": event.full_bytes}
                )
            case AnswerFinished(outcome) if plan:
                usage = outcome.usage
                tokens = {name: getattr(usage, name) if usage else None for name in TOKENS}
                found[-1] |= {**tokens, "response_id": outcome.response_id, "model": outcome.model}
            case _:
                pass
    return found


def find_false_events(events: Sequence[Event], wire: Sequence[RecordedRequest]) -> list[str]:
    """Return the differences between what the events of a run say about its requests, and what was sent."""
    said = list_sent(events)
    if len(said) != len(wire):
        return [f"events of {len(said)} requests, and {len(wire)} were sent"]
    return [
        f"event {name}: {facts[name]!r}, not {value!r}"
        for facts, request in zip(said, wire, strict=True)
        for name, value in describe_wire(request).items()
        if facts[name] != value
    ]


def _describe_plan(plan: RequestPlan) -> Facts:
    return {
        "mode": plan.mode,
        "anchor": plan.anchor.response_id if plan.anchor else "",
        "reason": plan.reason,
        "fallback": plan.fallback or "",
        "sent_blocks": plan.delta_blocks,
        "full_blocks": plan.full_blocks,
    }


def _describe_shape(response: Mapping[str, Any]) -> Facts:
    """Return the facts in the JSON of a response."""
    same = ("mode", "anchor", "reason", "healed", "sent_blocks", "response_id", "model", "status")
    return {
        **{name: response[name] for name in (*same, *TOKENS)},
        "full_blocks": response["sent_blocks"] + response["saved_blocks"],
        "sent_bytes": response["sent_bytes"],
        "full_bytes": response["sent_bytes"] + response["saved_bytes"],
    }


def _describe_plan_shape(plan: Mapping[str, Any]) -> Facts:
    return {name: plan[name] for name in (*PLAN_FACTS, "sent_bytes", "full_bytes")}


def _read_usage(row: RequestRecord) -> Usage:
    return Usage(**{name: getattr(row, name) or 0 for name in TOKENS})


def _find_usage(reply: bytes) -> Facts | None:
    """Return the token counts in the bytes of a reply, which are JSON or a stream."""
    texts = [line.removeprefix(b"data:").strip() for line in reply.splitlines()]
    for text in reversed(texts):
        if b'"usage"' not in text:
            continue
        found = json.loads(text)
        usage = (found.get("response") or found).get("usage")
        if usage:
            details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
            # Anthropic counts cached tokens apart from the others.
            read = usage.get("cache_read_input_tokens") or 0
            written = usage.get("cache_creation_input_tokens") or 0
            counted = usage.get("input_tokens", usage.get("prompt_tokens")) or 0
            return {
                "input_tokens": counted + read + written,
                "output_tokens": usage.get("output_tokens", usage.get("completion_tokens")),
                "cached_tokens": details.get("cached_tokens", read),
            }
    return None


def subtract(now: Mapping[str, Any], before: Mapping[str, Any]) -> Counter[tuple[str, str]]:
    """Return how much each metric has grown, by its name and the value of its label."""
    grown: Counter[tuple[str, str]] = Counter()
    for name, series in now.items():
        for labels, (_, value) in series.items():
            earlier = before.get(name, {}).get(labels, (0, 0.0))[1]
            if value != earlier:
                grown[name, labels[0][1] if labels else ""] += value - earlier
    return grown
