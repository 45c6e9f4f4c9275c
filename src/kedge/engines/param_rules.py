"""Convert parameters from the names of the Responses API to those of another API.

Every engine accepts the parameters of the Responses API, and has a table that converts them for its
provider. A parameter that is not in the table is sent unchanged; a known one that cannot be expressed
raises, because omitting it would change the answer silently.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from kedge.errors import UnsupportedParameter

Members = dict[str, Any]
ParamRule = Callable[[Any], Members]
"""Converts the value of a parameter to members of the body."""
ParamRules = Mapping[str, ParamRule]


def map_params(params: Mapping[str, Any], rules: ParamRules) -> Members:
    """Return the members of the body for these parameters; parameters that are ``None`` are omitted."""
    body: Members = {}
    for name, value in params.items():
        if value is None:
            continue
        if name in rules:
            merge(body, rules[name](value))
        else:
            merge(body, {name: value})
    return body


def merge(body: Members, more: Mapping[str, Any]) -> None:
    """Add members; objects with the same name are merged."""
    for name, value in more.items():
        present = body.get(name)
        if isinstance(present, dict) and isinstance(value, Mapping):
            body[name] = {**cast("Members", present), **cast("Mapping[str, Any]", value)}
        else:
            body[name] = value


def rename(name: str) -> ParamRule:
    """Return a rule that renames a parameter."""
    return lambda value: {name: value}


def reject_unless(param: str, remedy: str, *allowed: Any) -> ParamRule:
    """Return a rule that omits the allowed values, which have no effect, and rejects all others."""

    def rule(value: Any) -> Members:
        if any(value == each and type(value) is type(each) for each in allowed):
            return {}
        raise UnsupportedParameter(param, remedy)

    return rule


def map_members(param: str, rules: ParamRules) -> ParamRule:
    """Return a rule that maps the members of an object by a table and rejects unknown members."""

    def rule(value: Any) -> Members:
        body: Members = {}
        for name, member in _require_object(param, value).items():
            if member is None:
                continue
            if name not in rules:
                raise UnsupportedParameter(f"{param}.{name}", "leave it out")
            merge(body, rules[name](member))
        return body

    return rule


def map_by_type(param: str, rules: ParamRules) -> ParamRule:
    """Return a rule that maps an object or a string by its type and rejects unknown types."""

    def rule(value: Any) -> Members:
        kind: object = value
        if not isinstance(value, str):
            kind = _require_object(param, value).get("type")
        if not isinstance(kind, str) or kind not in rules:
            raise UnsupportedParameter(f"{param} {kind!r}", f"use one of {', '.join(rules)}")
        return rules[kind](value)

    return rule


NO_SERVER_STATE = "this API is stateless, so omit it"
STATELESS_RULES: ParamRules = {
    "truncation": reject_unless("truncation", "compact the Turn instead", "disabled"),
    "background": reject_unless("background", NO_SERVER_STATE, False),
    "prompt": reject_unless("prompt", NO_SERVER_STATE),
    "max_tool_calls": reject_unless("max_tool_calls", "limit the rounds of the middleware tools"),
}
"""Parameters that no stateless API has."""
STATELESS_PARAMS = frozenset(STATELESS_RULES)
"""Their names."""


def omit(value: Mapping[str, Any], *names: str) -> Members:
    """Return the members of an object except these and nulls."""
    return {k: v for k, v in value.items() if k not in names and v is not None}


def _require_object(param: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UnsupportedParameter(param, "pass an object")
    return cast("Mapping[str, Any]", value)
