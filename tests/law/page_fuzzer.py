"""Runs conversations through the API of the page, edits and forks them there, and checks every request.

After each turn, the context of the server's model is compared with the stored conversation, the stored requests and
the API's plan of each with the wire, and the blocks that the API returns with the message and its answer.
"""

import json
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kedge.evidence.server_evidence import Trust
from kedge.providers import connect
from kedge.server.request_log import RecordedRequest
from kedge.store import Store, open_store
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService
from law.networks import Network, SocketNetwork
from law.record_views import Facts, RecordStats, describe_row, describe_wire, is_create_request
from law.stored_conversations import alpha, beta
from normalization import expected_context, normalize_items

MESSAGES = (
    "Line {n}",
    "Please call alpha.",
    "Please call alpha and call beta.",
    "Think about {n}.",
    "What did I say first?",
    "Line {n} " + "with a longer tail of words " * 12,
)
FAULTS = ("status=500", "cut_after_events=1", "cut_after_events=5", "forget_silently,echo=no")
ACTIONS = {
    "send": 10,
    "regenerate": 2,
    "branch": 2,
    "edit": 3,
    "fork": 1,
    "resume": 2,
    "disturb": 2,
    "forget": 1,
    "expire": 1,
    "switch": 1,
}
"""The actions, each with its weight."""
MODES = ("chained", "chained", "stateless", "conversation")


@dataclass(slots=True)
class PageStats:
    """The results of a round."""

    answers: int = 0
    incoherent: int = 0
    lost: int = 0
    first_problem: str = ""

    def report(self, problem: str) -> None:
        """Retain the first problem."""
        self.first_problem = self.first_problem or problem


@dataclass
class PageFuzzer:
    """One round: a server, a store, the page, and conversations in it."""

    rng: random.Random
    trust: Trust = "earned"
    stats: PageStats = field(default_factory=PageStats)
    records: RecordStats = field(default_factory=RecordStats)
    network: Network = field(default_factory=SocketNetwork)
    names: list[str] = field(default_factory=list[str])
    """The ids of the conversations, of which the last is the current one."""
    known: set[int] = field(default_factory=set[int])
    """The nodes of requests that were compared."""
    count: int = 0
    server: TestServer = field(init=False)
    store: Store = field(init=False)
    page: httpx2.AsyncClient = field(init=False)

    async def run(self, count: int) -> PageStats:
        """Take random actions."""
        async with AsyncExitStack() as stack:
            await self._open(stack)
            await self._create()
            for action in self.rng.choices(list(ACTIONS), list(ACTIONS.values()), k=count):
                await getattr(self, f"do_{action}")()
        return self.stats

    async def _open(self, stack: AsyncExitStack) -> None:
        self.server = await stack.enter_async_context(self.network.open_server())
        if self.rng.random() < 0.3:
            self.server.faults.set("anonymous")
        opened = await open_store("sqlite://:memory:", clock=self.server.clock)
        self.store = await stack.enter_async_context(opened)
        engine = connect(
            f"responses:{self.server.base_url}#practice",
            max_retries=0,
            clock=self.server.clock,
            trust=self.trust,
        )
        stack.push_async_callback(engine.aclose)
        models = ModelSelector(engine, ("practice",), self.server.base_url)
        settings = {"tools": [alpha, beta]}
        service = ConversationService(self.store, models, settings, clock=self.server.clock)
        url = await stack.enter_async_context(self.network.open_app(create_page(service)))
        client = httpx2.AsyncClient(base_url=url, timeout=300)
        self.page = await stack.enter_async_context(client)

    @property
    def path(self) -> str:
        """The path of the current conversation."""
        return f"/api/conversations/{self.names[-1]}"

    async def _post(self, path: str, body: Facts) -> Facts:
        reply = await self.page.post(path, json=body)
        return reply.json() if reply.status_code < 400 else {}

    async def _get(self, path: str, **query: Any) -> Facts:
        return (await self.page.get(path, params=query)).json()

    async def _create(self) -> None:
        body = {"mode": self.rng.choice(MODES), "system": self.rng.choice(("", "Be brief."))}
        self.names.append((await self._post("/api/conversations", body))["id"])

    async def _list_blocks(self) -> list[Facts]:
        blocks: list[Facts] = (await self._get(f"{self.path}/turns"))["blocks"]
        return [each for each in blocks if each["kind"] in ("user", "assistant")]

    async def _start_run(self, path: str, body: Facts) -> None:
        """Start a run, complete or streamed, and check its requests."""
        since = len(self.server.requests)
        is_streamed = self.rng.random() < 0.5
        reply = await self.page.post(path, json={**body, "stream": is_streamed})
        wire = [each for each in self.server.requests[since:] if is_create_request(each)]
        await self._check_rows(await self._list_new_rows(), wire)
        answer = _find_answer(reply, is_streamed)
        if not answer or not wire:
            return
        self.stats.answers += 1
        await self._check_context(answer["node"], wire[-1])
        await self._check_blocks(body.get("message", ""), answer)

    async def _list_new_rows(self) -> list[Any]:
        rows = [each for each in await self.store.responses() if each.node not in self.known]
        self.known |= {each.node for each in rows}
        return rows

    async def _check_context(self, node: int, request: RecordedRequest) -> None:
        row = await self.store.conversation(self.names[-1])
        turn = (await self.store.load(row, node)).turn(row.id)
        read, expected = normalize_items(request.context), expected_context(turn)
        if read != expected:
            self.stats.incoherent += 1
            self.stats.report(f"read {read}\nnot {expected}")

    async def _check_rows(self, rows: list[Any], wire: list[RecordedRequest]) -> None:
        """Compare the stored requests, and what the API says about them, with the wire."""
        self.records.requests += len(wire)
        if len(rows) != len(wire):
            self.records.report(f"{len(rows)} rows of {len(wire)} requests")
        for row, request in zip(rows, wire, strict=False):
            plan = await self._get(f"{self.path}/plans/{row.node}")
            for place, facts in (("row", describe_row(row)), ("plan", plan)):
                for name, value in describe_wire(request).items():
                    if facts[name] != value:
                        self.records.report(f"{place} {name}: {facts[name]!r}, not {value!r}")

    async def _check_blocks(self, text: str, answer: Facts) -> None:
        """Check that the API returns the message and its answer."""
        turns = await self._get(f"{self.path}/turns", at=answer["node"])
        found = json.dumps(turns["blocks"])
        for part in (text, answer["text"]):
            if json.dumps(part)[1:-1] not in found:
                self.stats.lost += 1
                self.stats.report(f"lost {part!r} from {found}")

    def _make_text(self) -> str:
        self.count += 1
        return self.rng.choice(MESSAGES).format(n=self.count)

    async def do_send(self, **body: Any) -> None:
        """Send a message."""
        await self._start_run(f"{self.path}/runs", {"message": self._make_text(), **body})

    async def do_regenerate(self) -> None:
        """Send a message again with another text."""
        users = [each for each in await self._list_blocks() if each["kind"] == "user"]
        if users:
            await self.do_send(edit=self.rng.choice(users)["id"])

    async def do_branch(self) -> None:
        """Send a message from an earlier response."""
        nodes = (await self._get(f"{self.path}/tree"))["nodes"]
        answers = [each["node"] for each in nodes if each["response"]]
        if answers:
            await self.do_send(at=self.rng.choice(answers))

    async def do_edit(self) -> None:
        """Replace the text of a message or an answer."""
        blocks = await self._list_blocks()
        if blocks:
            block = self.rng.choice(blocks)["id"]
            body = {"block": block, "text": f"Edited {self.rng.random()}"}
            await self._post(f"{self.path}/edit", body)

    async def do_fork(self) -> None:
        """Fork from the head or a block."""
        blocks = await self._list_blocks()
        at = {"block": self.rng.choice(blocks)["id"]} if blocks and self.rng.random() < 0.7 else {}
        forked = await self._post(f"{self.path}/fork", at)
        if forked:
            self.names.append(forked["id"])

    async def do_resume(self) -> None:
        """Send a question without an answer again."""
        nodes = (await self._get(f"{self.path}/tree"))["nodes"]
        parents = {each["parent"] for each in nodes}
        open_ = [n["node"] for n in nodes if n["kind"] == "asked" and n["node"] not in parents]
        if open_:
            body = {"node": self.rng.choice(open_), "restart": self.rng.random() < 0.5}
            await self._start_run(f"{self.path}/resume", body)

    async def do_disturb(self) -> None:
        """Send a message to a server that fails once."""
        self.server.faults.set(self.rng.choice(FAULTS), times=1)
        await self.do_send()
        self.server.faults.clear()

    async def do_forget(self) -> None:
        """Delete all responses of the server."""
        self.server.forget()

    async def do_expire(self) -> None:
        """Advance the clocks by a month, and delete expired responses."""
        self.server.clock.advance(days=31)
        self.server.purge()

    async def do_switch(self) -> None:
        """Switch to another conversation, or a new one."""
        if self.rng.random() < 0.3:
            await self._create()
        self.rng.shuffle(self.names)


def _find_answer(reply: httpx2.Response, is_streamed: bool) -> Facts:
    """Return the answer of a run, or nothing if it failed."""
    if not is_streamed:
        return reply.json() if reply.status_code == 200 else {}
    lines = [line for line in reply.text.splitlines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    return next((each["reply"] for each in events if each.get("type") == "done"), {})
