"""Answers as JSON, for the ``json_object`` and ``json_schema`` formats of a request."""

import json
from collections.abc import Mapping
from typing import Any, cast

from kedge.practice.context import results, since_last_said
from kedge.practice.filling import fill
from kedge.practice.hints import Hints
from kedge.practice.rule import Heard, Said


def formatted(heard: Heard, said: Said) -> str:
    """Put what is said into the form that the request wants."""
    wanted = heard.ask.text_format or {}
    match wanted.get("type"):
        case "json_schema":
            return _json(_fitting(heard, said, wanted.get("schema")))
        case "json_object":
            return _json({"answer": said.text if said.value is None else said.value})
        case _:
            return said.text


def _fitting(heard: Heard, said: Said, schema: object) -> Any:
    """Fill the schema: the fact of the answer first, tool results, the sentence, then the text."""
    extra: dict[str, Any] = {}
    for _, output in results(since_last_said(heard.ask.items)):
        extra |= _object(output)
    return fill(schema, Hints(heard.sentence, extra=extra), lambda _: said.text, said.value)


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
