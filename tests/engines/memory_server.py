"""A small server of the Responses API with configurable faults of its stored context.

For each request it records the items that its model read, which the tests compare with the Turn.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import complete_response, json_response, message_item, sse_response
from kedge.errors import StoreError
from kedge.usage.tokens import count_items

Item = dict[str, Any]
Body = dict[str, Any]

ORDINARY = "Please tell me a little more about the rivers of the north, and about number {}."
"""A message of ordinary length: the token count of a request with it can prove that the context was used."""


class FakeClock:
    """A clock set by a test; every reading is a little later than the one before."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class EvidenceStore:
    """A store of evidence that can be closed by a test."""

    def __init__(self) -> None:
        self.saved: dict[str, Mapping[str, Any]] = {}
        self.is_closed = False

    async def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return the saved evidence."""
        return self.saved.get(key)

    async def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Save the evidence, or raise an error if the store is closed."""
        if self.is_closed:
            raise StoreError("the store is closed; open it again")
        self.saved[key] = form


@dataclass
class MemoryServer:
    """A server whose attributes can be changed between requests."""

    stores: bool = True
    """Whether responses are stored; if not, a previous response is ignored."""
    rejects_unknown: bool = False
    """Whether an unknown previous response is a 404 with the message of vLLM."""
    fails_chained: bool = False
    """Whether every request with a previous response is answered with status 500."""
    cap: int | None = None
    """How many responses of a chain the model reads."""
    echo: str = "request"
    """How an answer reports its previous response: request, null, late or missing."""
    usage: str = "honest"
    """Which tokens are counted: honest, none, constant, new, apart (cached tokens) or llama."""
    counter_ids: bool = False
    """Whether ids are numbers that start from one again after each restart."""
    lists: bool = True
    """Whether stored responses can be fetched."""
    reports_unstored: bool = False
    calls_tool: bool = False
    hidden_prompt: int = 0
    """Tokens of a system prompt that the server adds."""
    bodies: list[Body] = field(default_factory=list[Body])
    contexts: list[list[Item]] = field(default_factory=list[list[Item]])
    """What the model read, for each accepted request."""
    stored: dict[str, tuple[str, list[Item], list[Item]]] = field(
        default_factory=dict[str, tuple[str, list[Item], list[Item]]]
    )
    """Parent, input and output of each stored response."""
    made: int = 0

    def restart(self) -> None:
        """Forget everything, including the ids."""
        self.stored.clear()
        self.made = 0

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        path = request.url.path
        if request.method == "GET":
            return self._fetch(path)
        return self._create(await request.json())

    def _fetch(self, path: str) -> Response:
        parts = path.split("/")
        if parts[-1] == "models":
            return json_response({"object": "list", "data": []})
        response_id = parts[3] if len(parts) > 3 else ""
        if not self.lists or response_id not in self.stored:
            return json_response({"detail": "Not Found"}, 404)
        parent, items, output = self.stored[response_id]
        if parts[-1] == "input_items":
            return json_response({"data": items, "has_more": False})
        return json_response(
            {"id": response_id, "output": output, "previous_response_id": parent or None}
        )

    def _create(self, body: Body) -> Response:
        self.bodies.append(body)
        previous = body.get("previous_response_id") or ""
        if previous and self.rejects_unknown and previous not in self.stored:
            message = f"Response with id '{previous}' not found."
            error = {"message": message, "type": "NotFoundError", "param": "response_id"}
            return json_response({"error": {**error, "code": 404}}, 404)
        if previous and self.fails_chained:
            return json_response({"error": {"message": "Internal Server Error"}}, 500)
        history = self._history(previous)
        context = [*history, *body["input"]]
        self.contexts.append(context)
        self.made += 1
        response_id = f"resp_{self.made}" if self.counter_ids else f"resp_{self.made}_{id(self):x}"
        output = self._answer(len(context))
        if self.stores and body.get("store") is not False:
            self.stored[response_id] = (previous, body["input"], output)
        usage = self._count(history, body["input"], output)
        response = complete_response(response_id, *output, usage=usage)
        if self.reports_unstored:
            response["store"] = False
        if self.echo != "missing":
            response["previous_response_id"] = previous if self.echo == "request" else None
        if self.echo == "request" and not previous:
            response["previous_response_id"] = None
        return self._stream(response, previous) if body.get("stream") else json_response(response)

    def _history(self, previous: str) -> list[Item]:
        parts: list[list[Item]] = []
        while previous in self.stored:
            previous, items, output = self.stored[previous]
            parts.append([*items, *output])
        parts = parts if self.cap is None else parts[: self.cap]
        return [item for part in reversed(parts) for item in part]

    def _answer(self, number: int) -> list[Item]:
        text = f"You are reading an answer that was made from {number} items of context."
        output = [message_item(text)]
        if self.calls_tool:
            call_id = f"call_{self.made}"
            output.append(
                {"type": "function_call", "id": "fc", "call_id": call_id, "name": "add"}
                | {"arguments": "{}"}
            )
        return output

    def _count(self, history: list[Item], items: list[Item], output: list[Item]) -> Any:
        tokens, cached = count_items([*history, *items]) + self.hidden_prompt, 0
        match self.usage:
            case "none":
                return None
            case "constant":
                tokens = 10
            case "new":
                tokens = count_items(items)
            case "apart":
                cached = count_items(history)
                tokens -= cached
            case "llama":  # another tokenizer, and more tokens per item
                tokens = int(tokens * 1.2) + 3 * (len(history) + len(items))
            case _:
                pass
        output_tokens = count_items(output)
        return {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens + output_tokens,
        }

    def _stream(self, response: Body, previous: str) -> Response:
        started = {**response, "status": "in_progress", "output": [], "usage": None}
        if self.echo == "late":
            started["previous_response_id"] = previous or None
        output = response["output"]
        return sse_response(
            {"type": "response.created", "response": started},
            *(event for at, item in enumerate(output) for event in _stream_item(at, item)),
            {"type": "response.completed", "response": json.loads(json.dumps(response))},
        )


def _stream_item(at: int, item: Item) -> list[Body]:
    started_item = {**item, "content": [], "arguments": "", "status": "in_progress"}
    if item["type"] == "message":
        del started_item["arguments"]
        delta = {"type": "response.output_text.delta", "item_id": item["id"], "content_index": 0}
        delta["delta"] = item["content"][0]["text"]
    else:
        del started_item["content"]
        delta = {"type": "response.function_call_arguments.delta", "item_id": item["id"]}
        delta["delta"] = item["arguments"]
    return [
        {"type": "response.output_item.added", "output_index": at, "item": started_item},
        {**delta, "output_index": at},
        {"type": "response.output_item.done", "output_index": at, "item": item},
    ]
