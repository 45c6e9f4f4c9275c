"""Random trees of responses, judged twice: by the server, and by a plain model of what it should do.

The model keeps every context as a whole list and checks it as a whole; the server keeps shared
parts and checks only what is new. They must agree on every request: taken or refused, in the same
words, with the same context before the model's eyes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.server.coherence import check_context, resolve
from kedge.server.errors import ApiError
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve

Item = dict[str, Any]

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@dataclass
class Plain:
    """What a server should hold: whole contexts by response, and every stored item."""

    contexts: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    stored: dict[str, Item] = field(default_factory=dict[str, Item])
    before: dict[str, str] = field(default_factory=dict[str, str])
    own: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    gone: set[str] = field(default_factory=set[str])

    def item(self, id: str) -> Item | None:  # noqa: A002 - the protocol's word
        return self.stored.get(id)

    def reasoning_before(self, id: str) -> str | None:  # noqa: A002 - the protocol's word
        return self.before.get(id) if id in self.stored else None

    def verdict(self, previous: str | None, new: list[Item]) -> str:
        """Say what the server should say to this request."""
        if previous in self.gone:
            return f"Previous response with id '{previous}' not found."
        context = self.contexts[previous] if previous else []
        try:
            check_context(context, resolve(new, self), self)
        except ApiError as error:
            return error.message
        return "taken"

    def learn(self, response: Item, previous: str | None, given: list[Item]) -> None:
        """Note what a response that was made has added."""
        earlier = self.contexts[previous] if previous else []
        self.contexts[response["id"]] = [*earlier, *given, *response["output"]]
        if not response["store"]:
            self.gone.add(response["id"])
            return
        # An item is known by the id that the server gave it; a client's copy of it is not.
        key = response["id"].removeprefix("resp_")
        mine = {item["id"]: item for item in [*given, *response["output"]] if key in item["id"]}
        self.own[response["id"]] = list(mine)
        self.stored |= mine
        for one, other in zip(response["output"], response["output"][1:], strict=False):
            if one["type"] == "reasoning":
                self.before[other["id"]] = one["id"]

    def delete(self, response_id: str) -> None:
        """Let a response go; what builds on it keeps its context, but nobody else can refer to it."""
        self.gone.add(response_id)
        for item_id in self.own[response_id]:
            del self.stored[item_id]


@pytest.fixture(scope="module", params=[0, 32 * 1024 * 1024], ids=["from disk", "from memory"])
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    with serve(limits=Limits(cache_bytes=request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: TestServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as made:
        yield made


def gist(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be the same of an item, however it is written."""
    content = item.get("content")
    text = (
        content if isinstance(content, str) else "".join(p.get("text", "") for p in content or [])
    )
    return item.get("type", "message"), item.get("role"), text, item.get("call_id")


def open_calls(context: list[Item]) -> list[str]:
    answered = {item["call_id"] for item in context if item.get("type") == "function_call_output"}
    calls = [item["call_id"] for item in context if item.get("type") == "function_call"]
    return [call_id for call_id in calls if call_id not in answered]


SAYINGS = ["Hello", "Call weather.", "Think about 6 * 7", "Call weather and weather."]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """One request, in terms of what is there when its time comes."""
    return {
        "parent": draw(st.integers(-1, 12)),
        "answers": draw(st.sampled_from(["all", "all", "all", "all", "some", "none", "wrong"])),
        "say": draw(st.sampled_from([*SAYINGS, None])),
        "repeat": draw(st.sampled_from([None, None, None, "item", "reference"])),
        "foreign": draw(st.booleans()),
        "store": draw(st.sampled_from([True, True, True, False])),
        "delete": draw(st.sampled_from([False, False, False, True])),
    }


def written(plan: dict[str, Any], plain: Plain, previous: str | None) -> list[Item]:
    """Write the input of a planned request."""
    context = plain.contexts[previous] if previous else []
    calls = open_calls(context)
    answered = {"all": calls, "some": calls[1:], "none": [], "wrong": ["call_wrong"]}
    items: list[Item] = [
        {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        for call_id in answered[plan["answers"]]
        if calls or plan["answers"] == "wrong"
    ]
    source = list(plain.stored.values()) if plan["foreign"] else context
    if plan["repeat"] and source:
        known = source[plan["parent"] % len(source)]
        if plan["repeat"] == "reference":
            items.append({"type": "item_reference", "id": known.get("id", "msg_unknown")})
        elif known["type"] != "reasoning":
            items.append({name: value for name, value in known.items() if name != "logprobs"})
    if plan["say"] or not items:
        items.append({"role": "user", "content": plan["say"] or "Hello"})
    return items


@settings(max_examples=25, deadline=None)
@given(plans=st.lists(requests(), min_size=1, max_size=10))
def test_the_server_and_a_plain_model_agree_on_every_chain(
    server: TestServer, http: httpx.Client, plans: list[dict[str, Any]]
) -> None:
    """Forks, tool calls, replays, references, unstored and deleted responses, in any order."""
    plain, made = Plain(), list[str]()
    for plan in plans:
        alive = [one for one in made if one not in plain.gone]
        several = alive if alive and plan["parent"] <= 10 else made
        previous = several[plan["parent"] % len(several)] if made and plan["parent"] >= 0 else None
        items = written(plan, plain, previous)
        expected = plain.verdict(previous, items)
        answer = http.post(
            "/v1/responses",
            json={
                "model": "practice",
                "input": items,
                "previous_response_id": previous,
                "store": plan["store"],
                "tools": [TOOL],
            },
        )
        body = answer.json()
        got = "taken" if answer.status_code == 200 else body["error"]["message"]
        assert got == expected
        if got != "taken":
            continue
        seen = list(server.requests[-1].context or ())
        earlier = plain.contexts[previous] if previous else []
        assert list(map(gist, seen[: len(earlier)])) == list(map(gist, earlier))
        given_items = [dict(item) for item in seen[len(earlier) :]]
        assert list(map(gist, given_items)) == list(map(gist, resolve(items, plain)))
        plain.learn(body, previous, given_items)
        made.append(body["id"])
        if plan["delete"] and alive:
            lost = alive[plan["parent"] % len(alive)]
            assert http.delete(f"/v1/responses/{lost}").status_code == 200
            plain.delete(lost)
