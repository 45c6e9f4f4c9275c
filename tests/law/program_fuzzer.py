"""Runs the scripts of the memory fuzzer through a chained client or the proxy, as a program that replays history."""

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import httpx2
from openai import OpenAI, OpenAIError

from kedge import run_sync
from kedge.incremental import chain, chain_report
from kedge.observe import snapshot
from kedge.server.request_log import RecordedRequest
from kedge.store import Store
from kedge.store.open import open_current_database
from kedge.testing import TestServer, serve
from law.memory_fuzzer import BEHAVIORS, MESSAGES, THOUGHT, MemoryStats, is_visible_loss
from law.record_views import LogCollector, RecordStats, subtract
from normalization import normalize_items
from proxy.running import serve_proxy

DOORS = ("chain", "proxy")
REASONING = "reasoning.encrypted_content"
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
    _sent: list[Item] = field(default_factory=list[Item])
    """What was on the wire for each request of the program; empty if it failed."""
    _logs: LogCollector = field(default_factory=LogCollector)

    def run(self, count: int, *, late: str = "", edits: bool = False) -> MemoryStats:
        """Send messages; from the middle on, the server also has the behavior ``late``."""
        with ExitStack() as stack:
            server = stack.enter_context(serve())
            for fault in ("anonymous", *BEHAVIORS[self.behavior]):
                server.faults.set(fault)
            client = stack.enter_context(self._open_client(server))
            stack.enter_context(self._observe())
            for number in range(count):
                if late and number == count // 2:
                    server.faults.set(late)
                if edits and self.history and self.rng.random() < 0.2:
                    self._edit()
                self._send(server, client, number)
        return self.stats

    @contextmanager
    def _open_client(self, server: TestServer) -> Iterator[OpenAI]:
        options: Any = {"api_key": "k", "max_retries": 0}
        if self.door == "chain":
            with OpenAI(base_url=server.base_url, **options) as client:
                yield chain(client, trust=self.trust)
            return
        with TemporaryDirectory() as folder:
            store = Store(open_current_database(f"sqlite:///{folder}/store.db"))
            with (
                serve_proxy(server.base_url, trust=self.trust, store=store) as url,
                OpenAI(base_url=f"{url}/v1", **options) as client,
            ):
                yield client
            rows = run_sync(store.list_proxied(limit=len(self._sent) + 1))
            store.database.close()
        if len(rows) != len(self._sent):
            self.records.report(f"{len(rows)} rows of {len(self._sent)} requests")
        for wire, row in zip(self._sent, reversed(rows), strict=False):
            self._compare("row", wire, asdict(row))

    @contextmanager
    def _observe(self) -> Iterator[None]:
        """Collect the log records, and compare the growth of the metrics with the sums over the report."""
        logger, before = logging.getLogger("kedge.incremental"), snapshot()
        level = logger.level
        logger.addHandler(self._logs)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self._logs)
            logger.setLevel(level)
        grown, recent = subtract(snapshot(), before), self._logs.records
        for name, sums in {
            ("responses_bytes_sent_total", ""): sum(each.get("sent_bytes", 0) for each in recent),
            ("responses_bytes_full_total", ""): sum(each.get("full_bytes", 0) for each in recent),
            ("responses_delta_blocks_count", ""): sum(
                each.get("sent_blocks", 0) for each in recent
            ),
            ("responses_chained_requests_total", ""): sum(
                bool(each.get("anchor")) for each in recent
            ),
            ("tokens_total", "input"): sum(each.get("input_tokens") or 0 for each in recent),
            ("tokens_total", "output"): sum(each.get("output_tokens") or 0 for each in recent),
        }.items():
            if grown[name] != sums:
                self.records.report(f"metric {name} of {self.door}: {grown[name]}, not {sums}")

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

    def _send(self, server: TestServer, client: OpenAI, number: int) -> None:
        text = self.rng.choice(MESSAGES).format(n=number)
        text = THOUGHT.format(n=number) + text if self.reasoning else text
        self.history.append({"type": "message", "role": "user", "content": text})
        body: Any = {"model": "practice", "input": self.history, "stream": self.streaming}
        if self.reasoning:
            body["include"] = [REASONING]
        since, lost = len(server.requests), self._count_lost(client)
        self._sent.append({})
        try:
            answer: Any = client.responses.create(**body)
            if self.streaming:
                answer = [each for each in answer if each.type == "response.completed"][-1].response
        except (OpenAIError, IndexError):
            self.history.pop()
            return
        posted = [each for each in server.requests[since:] if each.method == "POST"]
        self.stats.requests += len(posted)
        self.stats.chained += sum("previous_response_id" in each.body for each in posted)
        self.stats.answers += 1
        read, expected = normalize_items(posted[-1].context), normalize_items(self.history)
        if read != expected:
            self.stats.wrong += 1
            is_flagged = self._count_lost(client) > lost
            self.stats.flagged += is_flagged
            self.stats.unreported += (
                is_visible_loss(self.behavior, read, expected) and not is_flagged
            )
            found = f"{self.door}, {self.behavior}, message {number}: read {read}, not {expected}"
            self.stats.first_wrong = self.stats.first_wrong or found
        record = self._read_report(client)["recent"][-1]
        self._compare_record(posted, record, answer.id or "", answer.usage)
        self.history += [_to_input(item.model_dump(exclude_none=True)) for item in answer.output]

    def _compare_record(
        self, posted: list[RecordedRequest], record: Item, response_id: str, usage: Any
    ) -> None:
        """Compare the record of a request with the body that was answered."""
        self.records.requests += 1
        wire = self._sent[-1] = {
            "anchor": posted[-1].body.get("previous_response_id", ""),
            "sent_bytes": len(posted[-1].raw),
            "sent_blocks": len(posted[-1].body["input"]),
            "full_blocks": len(self.history),
            "response_id": response_id,
            "is_healed": len(posted) > 1,
            "status": 200,
            "input_tokens": usage.input_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else None,
        }
        self._compare("report", wire, record)
        self._compare("log", wire, self._logs.records[-1])

    def _compare(self, place: str, wire: Item, record: Item) -> None:
        record = {**record, "is_healed": bool(record.get("healed"))}
        for name, value in wire.items():
            if (record.get(name) or None) != (value or None):  # a log record has no empty fields
                found = f"{place} of {self.door}, {self.behavior}: {name}"
                self.records.report(f"{found} is {record.get(name)!r}, not {value!r}")

    def _count_lost(self, client: OpenAI) -> int:
        return self._read_report(client)["lost"]

    def _read_report(self, client: OpenAI) -> Item:
        """Return the report, once it has all requests: a proxy reports after the end of a stream."""
        if self.door == "chain":
            found = chain_report(client)
            return {"lost": found.lost, "recent": [asdict(each) for each in found.recent]}
        deadline = monotonic() + 60
        while True:
            report: Any = httpx2.get(f"{str(client.base_url).removesuffix('v1/')}report").json()
            if report["requests"] >= len(self._sent) or monotonic() > deadline:
                return report


def _to_input(item: Item) -> Item:
    return {name: item[name] for name in item if name != "status"}
