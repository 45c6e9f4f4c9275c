"""A Request: the options of a run in the form that engines and middleware use."""

from collections.abc import Mapping
from typing import Any, Unpack

import msgspec
from msgspec.structs import force_setattr

from kedge.engines.options import (
    OPTION_CONVERTERS,
    OPTION_NAMES,
    BeforeSend,
    RequestOptions,
    ResendLimit,
    WireTap,
)
from kedge.engines.output_schema import OutputSchema, to_output_schema
from kedge.engines.params import check_params, combine_params
from kedge.errors import UnsupportedParameter
from kedge.planning import AnchorRecord, Mode
from kedge.tools.definitions import to_definition
from kedge.turns import Turn
from kedge.turns.content_filters import ContentFilter, ContentFilters, Filters
from kedge.turns.frozen_json import EMPTY, FrozenMap, thaw, wrap_copy


class TurnProbe(msgspec.Struct):
    """The last state of a Turn inside a middleware; see ``with_middleware``."""

    turn: Turn


_DEFINITION = frozenset({FrozenMap})
DEFAULT_OUTPUT_RETRIES = 2
"""The number of times that an answer without the requested type is requested again."""


class Request(msgspec.Struct, frozen=True):
    """The options of a request, in the form that engines and middleware use, with their defaults.

    ``RequestOptions`` describes them. It has the same names, because only a TypedDict gives types to keyword arguments.

    Attributes:
        params: The parameters: members of the request body, by the names of the provider's API.
        probe: The last state of the Turn inside the middleware that receives this request.
        filters: The content filters of the full stack, for components that send or store content.
        applied: The content filters outside of this position, which must also be applied to content added here.
        output: The schema of the answer, if it is typed.
    """

    model: str = ""
    mode: Mode | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = EMPTY
    candidates: tuple[AnchorRecord, ...] = ()
    streaming: bool = True
    resend_limit: ResendLimit | None = None
    probe: TurnProbe | None = None
    tap: WireTap | None = None
    before_send: BeforeSend | None = None
    heal: bool = True
    keep_reasoning: bool = True
    ephemeral: str = ""
    filters: ContentFilters = msgspec.field(default_factory=ContentFilters)
    applied: tuple[ContentFilter, ...] = ()
    output: OutputSchema[Any] | None = None
    output_retries: int = DEFAULT_OUTPUT_RETRIES

    def __post_init__(self) -> None:
        if not _DEFINITION.issuperset(map(type, self.tools)):
            force_setattr(self, "tools", tuple(map(to_definition, self.tools)))
        if type(self.params) is not FrozenMap:
            force_setattr(self, "params", wrap_copy(self.params))

    @classmethod
    def of(
        cls,
        *,
        output: Any = None,
        filters: Filters = (),
        foreign: frozenset[str] = frozenset(),
        **options: Unpack[RequestOptions],
    ) -> "Request":
        """Make a request from keyword options.

        Args:
            output: The type of the answer: any type that pydantic supports, or a JSON schema.
            filters: The content filters of the full stack.
            foreign: Names of parameters that are not suggested for a misspelled one; see ``Engine.foreign_params``.
            **options: See ``RequestOptions``.

        Raises:
            UnsupportedParameter: A parameter is decided by the plan, or has an unknown name.
            InvalidSetting: There is no such mode, or ``output`` has no JSON schema.
        """
        members: dict[str, Any] = {}
        params: dict[str, Any] = {}
        for name, value in options.items():
            if name in OPTION_CONVERTERS:
                members[name] = OPTION_CONVERTERS[name](value)
            elif name in OPTION_NAMES:
                members[name] = value
            else:
                params[name] = value
        if params:
            check_params(params, known_options=OPTION_NAMES | {"output"}, foreign=foreign)
        text: Mapping[str, Any] = params.get("text") or {}
        if output is not None and text.get("format"):
            problem = "output= determines text.format"
            raise UnsupportedParameter("text.format", "set one of the two", problem)
        if output is not None:
            members["output"] = to_output_schema(output)
        return cls(params=params, filters=ContentFilters(dict.fromkeys(filters)), **members)

    def to_options(self) -> dict[str, Any]:
        """Return the keyword options of this request, with which a dry run plans what it will send."""
        options = {name: getattr(self, name) for name in OPTION_NAMES | {"output"}}
        return {**thaw(self.params), **options}

    def resolve_params(self, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parameters of an engine and of this request, and the members of ``extra_body``.

        The parameters have the format of a typed answer.
        """
        params, extra = combine_params(defaults, thaw(self.params))
        if self.output is not None:
            params["text"] = {**(params.get("text") or {}), **self.output.request_options()["text"]}
        return params, extra
