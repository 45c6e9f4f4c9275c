"""Run random concurrent programs with the `openai` clients, bare and incremental, and compare what they observe.

The answer of the model is a function of the context that it received. So a request with a wrong context
has another answer, and the results do not depend on the order in which concurrent requests are sent.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from chaining.programs import message, replay
from chaining.proxy.running import serve_proxy
from kedge.chaining import chain
from kedge.server.errors import ApiError
from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, Prompt
from kedge.testing import serve
from normalization import normalize_items

ROUNDS = 8
BRANCHES = 4
KINDS = ["create", "create", "stream", "stream", "raw", "leave", "cancel"]


class DigestModel:
    """A model that answers with a digest of its context."""

    name = "practice"
    window = 400_000
    grace = 0.0

    def __init__(self) -> None:
        self.digests: dict[str, set[str]] = {}
        """The digests of the contexts of each request of a program."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        context = normalize_items(prompt.ask.items)
        digest = hashlib.sha256(repr(context).encode()).hexdigest()[:16]
        metadata = prompt.body["metadata"]
        self.digests.setdefault(metadata["request"], set()).add(digest)
        if metadata["fault"]:
            raise ApiError("This request fails.", status=int(metadata["fault"]))
        yield ItemOpened("text")
        for word in (digest, " is", " the", " digest."):
            yield ItemDelta(word)
            await asyncio.sleep(0)
        yield ItemClosed()

    async def summarize(self, items: Sequence[Any]) -> str:
        return ""

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Branch:
    """One message of a program: which history it continues, how that is changed, and how it is sent."""

    name: str
    source: float
    change: str
    position: float
    kind: str
    fault: str


def make_program(seed: int) -> list[list[Branch]]:
    """Return rounds of messages that are sent at the same time."""
    rng = random.Random(seed)
    return [
        [
            Branch(
                f"{number}.{branch}",
                rng.random(),
                rng.choice(["", "", "", "edit", "rewind", "insert"]),
                rng.random(),
                rng.choice(KINDS),
                rng.choice(["", "", "", "", "", "400", "500"]),
            )
            for branch in range(rng.randint(1, BRANCHES))
        ]
        for number in range(ROUNDS)
    ]


def change_history(history: list[Any], branch: Branch) -> None:
    """Change a history as programs do between two requests."""
    users = [at for at, item in enumerate(history) if item.get("role") == "user"]
    if not users:
        return
    at = users[int(branch.position * len(users))]
    if branch.change == "edit":
        history[at] = message(f"Edited in {branch.name}")
    elif branch.change == "insert":
        history.insert(at, message(f"Inserted in {branch.name}", "developer"))
    elif branch.change == "rewind":
        del history[at:]


def send_sync(client: OpenAI, kind: str, body: dict[str, Any]) -> Any:
    """Send a request; return None if the program does not read the response to its end."""
    if kind == "create":
        return client.responses.create(**body)
    if kind == "raw":
        return client.responses.with_raw_response.create(**body).parse()
    if kind == "stream":
        with client.responses.stream(**body) as events:
            return events.get_final_response()
    with client.responses.create(**body, stream=True) as stream:
        next(iter(stream))
    return None


async def send_async(client: AsyncOpenAI, kind: str, body: dict[str, Any]) -> Any:
    """Send a request; return None if the program does not read the response to its end."""
    if kind == "create":
        return await client.responses.create(**body)
    if kind == "raw":
        return (await client.responses.with_raw_response.create(**body)).parse()
    if kind == "stream":
        async with client.responses.stream(**body) as events:
            return await events.get_final_response()
    is_started = asyncio.Event()

    async def read() -> None:
        async with await client.responses.create(**body, stream=True) as stream:
            async for _ in stream:
                is_started.set()
                if kind == "leave":
                    break

    reader = asyncio.create_task(read())
    if kind == "cancel":
        started = asyncio.create_task(is_started.wait())
        await asyncio.wait([reader, started], return_when="FIRST_COMPLETED")
        started.cancel()
        reader.cancel()
    with suppress(asyncio.CancelledError):
        await reader
    return None


async def run_branch(
    client: Any, branch: Branch, history: list[Any], observed: dict[str, Any]
) -> list[Any]:
    """Send a message; return the new history, or the old one after a failure."""
    change_history(history, branch)
    history.append(message(f"Message {branch.name}"))
    metadata = {"request": branch.name, "fault": branch.fault}
    body: dict[str, Any] = {"model": "practice", "input": history, "metadata": metadata}
    try:
        if isinstance(client, OpenAI):
            response = await asyncio.to_thread(send_sync, client, branch.kind, body)
        else:
            response = await send_async(client, branch.kind, body)
    except (APIStatusError, RuntimeError) as error:  # a stream that fails has no final response
        observed[branch.name] = repr(error)
        return history[:-1]
    if response is None:
        return history[:-1]
    output = replay(response)
    observed[branch.name] = normalize_items(output)
    return [*history, *output]


async def run_program(client: Any, program: list[list[Branch]]) -> dict[str, Any]:
    """Run a program; return what it observed of each response that it read."""
    observed: dict[str, Any] = {}
    histories: list[list[Any]] = [[]]
    for branches in program:
        sources = [list(histories[int(each.source * len(histories))]) for each in branches]
        histories += await asyncio.gather(
            *(
                run_branch(client, branch, history, observed)
                for branch, history in zip(branches, sources, strict=True)
            )
        )
    return observed


def run_setup(program: list[list[Branch]], setup: str) -> tuple[dict[str, Any], DigestModel, int]:
    """Return what a program observed, its model, and the number of chained requests."""
    model = DigestModel()

    async def run(url: str) -> dict[str, Any]:
        client: Any = (OpenAI if "threads" in setup else AsyncOpenAI)(
            base_url=url, api_key="key", max_retries=0
        )
        if setup.startswith("chain"):
            chain(client)
        observed = await run_program(client, program)
        await (asyncio.to_thread(client.close) if "threads" in setup else client.close())
        return observed

    with serve(model=model, unknown_parameters="reject") as server:
        if setup == "proxy":
            with serve_proxy(server.base_url) as url:
                observed = asyncio.run(run(f"{url}/v1"))
        else:
            observed = asyncio.run(run(server.base_url))
        chained = ["previous_response_id" in each.body for each in server.requests if each.body]
    return observed, model, sum(chained)


PROGRAM = make_program(7)


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, Any], DigestModel]:
    """Return what the program observes without Kedge, and its model."""
    return run_setup(PROGRAM, "bare")[:2]


@pytest.mark.parametrize("setup", ["chain", "chain, threads", "proxy"])
def test_concurrent_programs_observe_the_same_as_without_kedge(
    setup: str, expected: tuple[dict[str, Any], DigestModel]
) -> None:
    """Answers, errors and contexts are equal, with branches, edits, cancelled streams and failures."""
    observed, model, chained = run_setup(PROGRAM, setup)
    assert observed == expected[0]
    assert {name: model.digests[name] for name in observed} == {
        name: expected[1].digests[name] for name in observed
    }
    assert len(observed) > 10
    assert chained > 3
