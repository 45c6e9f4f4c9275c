"""A stateless request, read: what is asked, in the words of the Responses API.

``body`` has the names and shapes of ``POST /v1/responses``, so that a model need not know which
endpoint a request came to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.server.draft import View, as_ask, count_settings, fitted
from kedge.server.ids import new_key
from kedge.server.items import written_out
from kedge.server.models import Model, Prompt
from kedge.server.service import Service
from kedge.server.wire import Item
from kedge.tokens import count_items


def within(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Give a parameter that is an object; an empty one where it was left out or is null."""
    return body.get(name) or {}


@dataclass(frozen=True, slots=True)
class Question:
    """One stateless request: its items, oldest first, and its parameters."""

    input: Sequence[Item]
    body: Mapping[str, Any]
    live: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that is ready for its model; ``key`` names what is written in answer to it."""

    key: str
    model: Model
    prompt: Prompt
    input_tokens: int


def asked(service: Service, question: Question) -> Asked:
    """Put a question to the model that it names; refuse one that is too long for it."""
    body = question.body
    model = service.find_model(body["model"])
    key = new_key(0)
    items = written_out(question.input, key)
    view = fitted(View(items, count_settings(body) + count_items(items)), body, model.window)
    prompt = Prompt(
        ask=as_ask(body, view.items),
        body=body,
        live=question.live,
        most=body.get("max_output_tokens"),
        stop=question.stop,
        unseal=service.unseal,
    )
    return Asked(key, model, prompt, view.tokens)
