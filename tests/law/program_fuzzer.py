"""Runs the scripts of the memory fuzzer through a chained client or the proxy, as a program that replays history."""

import json
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import anyio.to_thread
import httpx2
from openai import AsyncOpenAI, OpenAI, OpenAIError

from kedge.chaining import chain, chain_report
from kedge.chaining.proxy import create_proxy_app
from kedge.observe import snapshot
from kedge.server.faults.effects import REUSED_ID
from kedge.server.request_log import RecordedRequest
from kedge.store import Store
from kedge.store.open import open_current_database
from kedge.testing import TestServer
from law.memory_fuzzer import BEHAVIORS, MESSAGES, THOUGHT, MemoryStats, is_visible_loss
from law.networks import Network, SocketNetwork
from law.record_views import LogCollector, RecordStats, subtract
from normalization import normalize_items

DOORS = ("chain", "proxy")
CLIENTS = ("httpx", "sdk", "sync sdk")
"""The clients of programs: of httpx, which needs a tenth of the time of the SDK, and both of the SDK; a sync one
needs sockets."""
REASONING = "reasoning.encrypted_content"
METRICS = {
    ("responses_bytes_sent_total", ""): "sent_bytes",
    ("responses_bytes_full_total", ""): "full_bytes",
    ("responses_delta_blocks_count", ""): "sent_blocks",
    ("tokens_total", "input"): "input_tokens",
    ("tokens_total", "output"): "output_tokens",
}
"""The metrics of requests that are sums of a member of their log records."""
Item = dict[str, Any]


@dataclass
class ProgramFuzzer:
    """One round: a server with a behavior, and a program that reaches it through a client or the proxy."""

    rng: random.Random
    behavior: str
    door: str
    streaming: bool
    trust: Any = "earned"
    reasoning: bool = False
    stats: MemoryStats = field(default_factory=MemoryStats)
    history: list[Item] = field(default_factory=list[Item])
    records: RecordStats = field(default_factory=RecordStats)
    network: Network = field(default_factory=SocketNetwork)
    client: str = "sync sdk"
    _lost: int = 0
    """The number of losses in the last report."""
    _messages: int = 0
    """The number of requests of the program."""
    _sent: list[Item] = field(default_factory=list[Item])
    """What was on the wire, for each request there."""
    _logs: LogCollector = field(default_factory=LogCollector)

    async def run(self, count: int, *, late: str = "", edits: bool = False) -> MemoryStats:
        """Send messages; from the middle on, the server also has the behavior ``late``."""
        async with self.network.open_server() as server:
            for fault in ("anonymous", *BEHAVIORS[self.behavior]):
                server.faults.set(fault)
            async with self._open_client(server) as client:
                with self._observe():
                    await self._send_all(server, client, count, late=late, edits=edits)
        return self.stats

    async def _send_all(
        self, server: TestServer, client: Any, count: int, *, late: str, edits: bool
    ) -> None:
        for number in range(count):
            if late and number == count // 2:
                server.faults.set(late)
            if edits and self.history and self.rng.random() < 0.2:
                self._edit()
            await self._send(server, client, number)

    @asynccontextmanager
    async def _open_client(self, server: TestServer) -> AsyncGenerator[Any]:
        if self.door == "chain":
            async with self._connect(server.base_url) as client:
                yield chain(client, trust=self.trust)
            return
        with TemporaryDirectory() as folder:
            store = Store(open_current_database(f"sqlite:///{folder}/store.db"))
            proxy = create_proxy_app(server.base_url, trust=self.trust, store=store)
            async with (
                self.network.open_app(proxy) as url,
                self._connect(f"{url}/v1") as client,
                httpx2.AsyncClient(base_url=url) as self._http,
            ):
                yield client
            rows = await store.list_proxied(limit=len(self._sent) + 1)
            totals = await store.sum_proxied()
            store.database.close()
        self._compare_all("row", [asdict(each) for each in reversed(rows)])
        self._compare_totals("rows", asdict(totals), totals.healed)

    @contextmanager
    def _observe(self) -> Iterator[None]:
        """Collect the log records, and compare the growth of the metrics with the sums over the report."""
        logger, before = logging.getLogger("kedge.chaining"), snapshot()
        level = logger.level
        logger.addHandler(self._logs)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self._logs)
            logger.setLevel(level)
        grown, recent = subtract(snapshot(), before), self._logs.records
        for name, member in METRICS.items():
            sums = sum(each.get(member) or 0 for each in recent)
            if grown[name] != sums:
                self.records.report(f"metric {name} of {self.door}: {grown[name]}, not {sums}")
        kinds = Counter(_name_kind(each) for each in recent)
        for kind in ("chained", "stateless", "refused"):
            if grown[f"responses_{kind}_requests_total", ""] != kinds[kind]:
                self.records.report(f"metric of {kind} requests of {self.door}: not {kinds[kind]}")

    @asynccontextmanager
    async def _connect(self, base_url: str) -> AsyncGenerator[Any]:
        """Open the client of the program."""
        if self.client == "sync sdk":
            with OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
                yield client
        elif self.client == "sdk":
            async with AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
                yield client
        else:
            async with httpx2.AsyncClient(base_url=base_url, timeout=300) as client:
                yield client

    def _edit(self) -> None:
        messages = [item for item in self.history if item["type"] == "message"]
        edited = self.rng.choice(messages)
        match self.rng.choice(("text", "cut", "remove")):
            case "text":
                edited["content"] = f"Edited {self.rng.random()}"
            case "cut":
                del self.history[self.history.index(edited) :]
            case _:
                self.history.remove(edited)
        # Reasoning is valid only before the items that it was generated with.
        self.history = [item for item in self.history if item["type"] != "reasoning"]

    async def _send(self, server: TestServer, client: Any, number: int) -> None:
        text = self.rng.choice(MESSAGES).format(n=number)
        text = THOUGHT.format(n=number) + text if self.reasoning else text
        self.history.append({"type": "message", "role": "user", "content": text})
        body: Any = {"model": "practice", "input": self.history, "stream": self.streaming}
        if self.reasoning:
            body["include"] = [REASONING]
        since = len(server.requests)
        self._messages += 1
        answer: Item | None = None
        with suppress(OpenAIError, httpx2.HTTPError, IndexError):
            answer = await self._create(client, body)
        posted = [each for each in server.requests[since:] if each.method == "POST"]
        self._add_wire(posted, answer)
        report = await self._read_report(client)
        self._compare_all("report", report["recent"])
        self._compare_all("log", self._logs.records)
        self._compare_totals("report", report, sum(report["healed"].values()))
        if answer is None:
            self.history.pop()
            return
        self.stats.requests += len(posted)
        self.stats.chained += sum("previous_response_id" in each.body for each in posted)
        self.stats.answers += 1
        read, expected = normalize_items(posted[-1].context), normalize_items(self.history)
        is_flagged, self._lost = report["lost"] > self._lost, report["lost"]
        if read != expected:
            self.stats.wrong += 1
            self.stats.flagged += is_flagged
            is_visible = is_visible_loss(self.behavior, read, expected)
            self.stats.unreported += is_visible and not is_flagged
            found = f"{self.door}, {self.behavior}, message {number}: read {read}, not {expected}"
            self.stats.first_wrong = self.stats.first_wrong or found
        self.history += [_to_input(item) for item in answer["output"]]

    async def _create(self, client: Any, body: Any) -> Item:
        """Return the response to a request, of the last event of its stream."""
        if self.client == "httpx":
            reply = (await client.post("/responses", json=body)).raise_for_status()
            return _find_response(_parse_events(reply.text)) if self.streaming else reply.json()
        if self.client == "sync sdk":
            answer = await anyio.to_thread.run_sync(lambda: client.responses.create(**body))
            events = await anyio.to_thread.run_sync(list, answer) if self.streaming else [answer]
        else:
            answer = await client.responses.create(**body)
            events = [each async for each in answer] if self.streaming else [answer]
        dumped = [each.model_dump(exclude_none=True) for each in events]
        return _find_response(dumped) if self.streaming else dumped[0]

    def _add_wire(self, posted: list[RecordedRequest], answer: Item | None) -> None:
        """Add what was on the wire for one request of the program, of which the last request was answered."""
        self.records.requests += len(posted)
        self.records.healed += len(posted) > 1
        for number, each in enumerate(posted):
            self._sent.append(
                {
                    "anchor": each.body.get("previous_response_id", ""),
                    "sent_bytes": len(each.raw),
                    "full_bytes": len(posted[-1].raw) if len(posted) > 1 else None,
                    "sent_blocks": len(each.body["input"]),
                    "full_blocks": len(self.history),
                    "is_healed": number > 0,
                    "is_resent": number + 1 < len(posted),
                    "status": each.status,
                    "response_id": self._find_wire_id(each),
                }
            )
        if answer is not None:
            usage: Item = answer.get("usage") or {}
            self._sent[-1] |= {
                "response_id": answer.get("id") or "",
                "status": 200,
                "input_tokens": usage.get("input_tokens"),
                "output_tokens": usage.get("output_tokens"),
            }

    def _find_wire_id(self, request: RecordedRequest) -> str:
        """Return the id of a response as the client received it."""
        if request.status != 200:
            return ""
        return REUSED_ID if self.behavior == "reuses ids" else request.response_id or ""

    def _compare_all(self, place: str, records: Sequence[Item]) -> None:
        """Compare all records in one place with the requests on the wire."""
        if len(records) != len(self._sent):
            found = f"{len(records)} records for {len(self._sent)} requests on the wire"
            self.records.report(f"{place} of {self.door}, {self.behavior}: {found}")
        for wire, record in zip(self._sent, records, strict=False):
            self._compare(place, wire, record)

    def _compare_totals(self, place: str, totals: Item, healed: int) -> None:
        """Compare totals with the requests of the program and with those on the wire."""
        refused = [each for each in self._sent if 400 <= each["status"] < 500]
        accepted = [each for each in self._sent if each not in refused and not each["is_resent"]]
        expected = {
            "requests": self._messages,
            "wire requests": len(self._sent),
            "chained": sum(bool(each["anchor"]) for each in accepted),
            "refused": len(refused),
            "sent_bytes": sum(each["sent_bytes"] for each in self._sent),
            "full_bytes": sum(
                each["full_bytes"] for each in self._logs.records if not each.get("is_resent")
            ),
        }
        found = {**totals, "wire requests": totals["requests"] + healed}
        for name, value in expected.items():
            if found[name] != value:
                message = f"{name} is {found[name]!r}, not {value!r}"
                self.records.report(f"totals of {place}, {self.door}, {self.behavior}: {message}")

    def _compare(self, place: str, wire: Item, record: Item) -> None:
        record = {**record, "is_healed": bool(record.get("healed"))}
        for name, value in wire.items():
            if name == "full_bytes" and value is None:  # the body that the program wrote is unknown
                continue
            if (record.get(name) or None) != (value or None):  # a log record has no empty fields
                found = f"{place} of {self.door}, {self.behavior}: {name}"
                self.records.report(f"{found} is {record.get(name)!r}, not {value!r}")

    async def _read_report(self, client: Any) -> Item:
        """Return the report, once it has all requests: a proxy reports after the end of a stream."""
        if self.door != "proxy":
            found = chain_report(client)
            return {**asdict(found), "healed": dict(found.healed)}
        deadline = monotonic() + 60
        while True:
            report: Any = (await self._http.get("/report")).json()
            if len(report["recent"]) >= len(self._sent) or monotonic() > deadline:
                return report


def _name_kind(record: Mapping[str, Any]) -> str:
    """Return the kind of a request, as metrics count it."""
    if record.get("is_refused"):
        return "refused"
    return "chained" if record.get("anchor") else "stateless"


def _parse_events(text: str) -> list[Item]:
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _find_response(events: list[Item]) -> Item:
    return [each for each in events if each["type"] == "response.completed"][-1]["response"]


def _to_input(item: Item) -> Item:
    return {name: item[name] for name in item if name != "status" and item[name] is not None}
