"""Random trees of responses, compared between the server and a simple model of it.

The model stores each context as a complete list and checks all of it; the server stores shared parts
and checks only new items. Both must accept or reject each request with the same message and give the
language model the same context.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.server.coherence import EMPTY_COHERENCE, check_request, resolve_references
from kedge.server.errors import ApiError
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.conftest import open_client
from strategies import scale_examples

Item = dict[str, Any]

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@dataclass
class ServerModel:
    """The expected state of a server: the context of each response, and every stored item."""

    contexts: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    stored: dict[str, Item] = field(default_factory=dict[str, Item])
    reasoning_by_item: dict[str, str] = field(default_factory=dict[str, str])
    items_by_response: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    unavailable: set[str] = field(default_factory=set[str])

    def find_item(self, id: str) -> Item | None:  # noqa: A002 - name of the protocol
        return self.stored.get(id)

    def find_reasoning_before(self, id: str) -> str | None:  # noqa: A002 - name of the protocol
        return self.reasoning_by_item.get(id) if id in self.stored else None

    def expected_message(self, previous: str | None, new: list[Item]) -> str:
        """Return the error message expected for a request, or "taken"."""
        if previous in self.unavailable:
            return f"Previous response with id '{previous}' not found."
        context = self.contexts[previous] if previous else []
        try:
            before = EMPTY_COHERENCE.extend(context)
            check_request(before, resolve_references(new, self), self)
        except ApiError as error:
            return error.message
        return "taken"

    def record(self, response: Item, previous: str | None, items: list[Item]) -> None:
        """Record the items that a new response has added."""
        earlier = self.contexts[previous] if previous else []
        self.contexts[response["id"]] = [*earlier, *items, *response["output"]]
        if not response["store"]:
            self.unavailable.add(response["id"])
            return
        # Only items with an id from the server are stored by id, not copies sent by a client.
        key = response["id"].removeprefix("resp_")
        mine = {item["id"]: item for item in [*items, *response["output"]] if key in item["id"]}
        self.items_by_response[response["id"]] = list(mine)
        self.stored |= mine
        for one, other in zip(response["output"], response["output"][1:], strict=False):
            if one["type"] == "reasoning":
                self.reasoning_by_item[other["id"]] = one["id"]

    def delete(self, response_id: str) -> None:
        """Delete a response; its children retain their context, but its items cannot be referenced."""
        self.unavailable.add(response_id)
        for item_id in self.items_by_response[response_id]:
            del self.stored[item_id]


@pytest.fixture(scope="module", params=[0, 32 * 1024 * 1024], ids=["from disk", "from memory"])
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    with serve(limits=Limits(cache_bytes=request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: TestServer) -> Iterator[httpx.Client]:
    with open_client(server) as client:
        yield client


def item_summary(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of an item that are equal in all of its forms."""
    content = item.get("content")
    text = (
        content if isinstance(content, str) else "".join(p.get("text", "") for p in content or [])
    )
    return item.get("type", "message"), item.get("role"), text, item.get("call_id")


def open_calls(context: list[Item]) -> list[str]:
    answered = {item["call_id"] for item in context if item.get("type") == "function_call_output"}
    calls = [item["call_id"] for item in context if item.get("type") == "function_call"]
    return [call_id for call_id in calls if call_id not in answered]


PROMPTS = ["Hello", "Call weather.", "Think about 6 * 7", "Call weather and weather."]


@st.composite
def request_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Generate a request in terms of the state at the time it is sent."""
    return {
        "parent": draw(st.integers(-1, 12)),
        "answers": draw(st.sampled_from(["all", "all", "all", "all", "some", "none", "wrong"])),
        "say": draw(st.sampled_from([*PROMPTS, None])),
        "repeat": draw(st.sampled_from([None, None, None, "item", "reference"])),
        "foreign": draw(st.booleans()),
        "store": draw(st.sampled_from([True, True, True, False])),
        "delete": draw(st.sampled_from([False, False, False, True])),
    }


def build_input(plan: dict[str, Any], model: ServerModel, previous: str | None) -> list[Item]:
    """Return the input of a planned request."""
    context = model.contexts[previous] if previous else []
    calls = open_calls(context)
    answered = {"all": calls, "some": calls[1:], "none": [], "wrong": ["call_wrong"]}
    items: list[Item] = [
        {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        for call_id in answered[plan["answers"]]
        if calls or plan["answers"] == "wrong"
    ]
    source = list(model.stored.values()) if plan["foreign"] else context
    if plan["repeat"] and source:
        known = source[plan["parent"] % len(source)]
        if plan["repeat"] == "reference":
            items.append({"type": "item_reference", "id": known.get("id", "msg_unknown")})
        elif known["type"] != "reasoning":
            items.append({name: value for name, value in known.items() if name != "logprobs"})
    if plan["say"] or not items:
        items.append({"role": "user", "content": plan["say"] or "Hello"})
    return items


@settings(max_examples=scale_examples(13), deadline=None)
@given(plans=st.lists(request_plans(), min_size=1, max_size=10))
def test_server_and_model_agree_on_every_chain(
    server: TestServer, http: httpx.Client, plans: list[dict[str, Any]]
) -> None:
    """Server and model agree on forks, tool calls, repeated items, references and deleted responses."""
    plain = ServerModel()
    response_ids = list[str]()
    for plan in plans:
        alive = [one for one in response_ids if one not in plain.unavailable]
        several = alive if alive and plan["parent"] <= 10 else response_ids
        is_chained = response_ids and plan["parent"] >= 0
        previous = several[plan["parent"] % len(several)] if is_chained else None
        items = build_input(plan, plain, previous)
        expected = plain.expected_message(previous, items)
        sent = {"model": "m", "input": items, "store": plan["store"], "tools": [TOOL]}
        answer = http.post("/v1/responses", json={**sent, "previous_response_id": previous})
        body = answer.json()
        result = "taken" if answer.status_code == 200 else body["error"]["message"]
        assert result == expected
        if result != "taken":
            continue
        context = list(server.requests[-1].context or ())
        earlier = plain.contexts[previous] if previous else []
        given_items = [dict(item) for item in context[len(earlier) :]]
        expected_context = [*earlier, *resolve_references(items, plain)]
        assert list(map(item_summary, context)) == list(map(item_summary, expected_context))
        plain.record(body, previous, given_items)
        response_ids.append(body["id"])
        if plan["delete"] and alive:
            lost = alive[plan["parent"] % len(alive)]
            assert http.delete(f"/v1/responses/{lost}").status_code == 200
            plain.delete(lost)
