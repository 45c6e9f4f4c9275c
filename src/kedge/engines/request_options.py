"""A request: its options, parameters, definitions of tools and content filters, and the items of its input.

A misspelled option that is sent to the server changes an answer without notice, and an option such as
``previous_response_id`` makes the server continue from a context that the Turn does not have. Both are
rejected by name before anything is sent. Body members that Kedge does not know must be in the mapping
``extra_body``.

The same definitions of tools are part of every request of a conversation, where they are encoded for the body and
compared with those of the previous requests. So they cannot be changed, and each of their forms is computed once.

A middleware processes a Turn only at its position in the stack, but content is added to a Turn at several
positions: tools append results inside a guard, a compactor sends history to a model outside of one, a
conversation stores blocks without any run. So a request carries the filters of all middlewares of the
stack, next to the position-dependent ones, and every component that sends or stores content applies them.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec
from msgspec.structs import force_setattr

from kedge._internal.argument_types import check_members
from kedge._internal.arguments import check_callback, check_count, list_arguments
from kedge.engines.output_schema import OutputSchema, to_output_schema
from kedge.errors import InvalidSetting, UnsupportedParameter, describe_type
from kedge.planning import AnchorRecord, Mode, RequestPlan
from kedge.planning.anchors import validate_mode
from kedge.turns import Block, SystemBlock, Turn
from kedge.turns.frozen_json import EMPTY, FrozenMap, compute_once, thaw, wrap_copy
from kedge.wire.fields import CALL_ARGUMENTS

Params = Mapping[str, Any]
"""Parameters of a request: members of its body."""
WireTap = Callable[[bytes, bytes, int | None], None]
"""Called with the body of a request, the body of its reply, and the reply's status, if there was one."""


OfferedTools = Mapping[str, Any] | Callable[..., Any] | Iterable[Any]
"""Functions, tools, toolboxes and tool definitions, or one of these."""

BeforeSend = Callable[[Turn], Awaitable[None]]
"""Awaited with each Turn exactly as it is about to be sent."""


EphemeralBlocks = str | SystemBlock | Iterable[str | SystemBlock]
"""System text that is sent with the requests of one run and is not part of any Turn."""


class ResendLimit(msgspec.Struct, frozen=True):
    """The largest full send after a loss or a change; a longer history is compacted first, or an error.

    Args:
        max_bytes: The maximum size of all blocks.
        max_blocks: The maximum number of blocks.
    """

    max_bytes: int | None = None
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        for limit in filter(None, (self.max_bytes, self.max_blocks)):
            check_count("resend_limit", limit)

    def is_exceeded(self, plan: RequestPlan) -> bool:
        """Return whether a full send of this plan's Turn is longer."""
        sizes = ((plan.full_bytes, self.max_bytes), (plan.full_blocks, self.max_blocks))
        return any(limit is not None and size > limit for size, limit in sizes)


def to_resend_limit(limit: int | ResendLimit | None) -> ResendLimit | None:
    """Return a limit that was given as a number of bytes, as a `ResendLimit`."""
    return ResendLimit(limit) if limit is not None and not isinstance(limit, ResendLimit) else limit


class BodyParams(TypedDict, total=False):
    """Body members of the Responses, Chat Completions and Messages APIs that a caller may set."""

    background: bool
    cache_control: Mapping[str, Any]
    context_management: Sequence[Mapping[str, Any]]
    frequency_penalty: float
    include: Sequence[str]
    logit_bias: Mapping[str, float]
    logprobs: bool
    max_completion_tokens: int
    max_output_tokens: int
    max_tokens: int
    max_tool_calls: int
    metadata: Mapping[str, Any]
    moderation: Mapping[str, Any]
    n: int
    output_config: Mapping[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    prompt: Mapping[str, Any]
    prompt_cache_key: str
    prompt_cache_retention: str
    reasoning: Mapping[str, Any]
    reasoning_effort: str
    response_format: Mapping[str, Any]
    safety_identifier: str
    seed: int
    service_tier: str
    stop: str | Sequence[str]
    stop_sequences: Sequence[str]
    store: bool
    stream_options: Mapping[str, Any]
    temperature: float
    text: Mapping[str, Any]
    thinking: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    top_k: int
    top_logprobs: int
    top_p: float
    truncation: str
    user: str
    verbosity: str


class RequestOptions(BodyParams, total=False):
    """The keyword arguments of ``run``, ``ask``, ``stream``, ``send`` and ``plan``.

    Attributes:
        model: The model to use instead of the engine's.
        mode: The mode to use instead of the conversation's or the engine's.
        tools: Tools to offer: an iterable of functions, tools, toolboxes and definitions in the form of the
            Responses API, or one of these. A run calls functions, tools and toolboxes, with the approver of the
            stack; calls of definitions are left to the caller.
        candidates: Further anchors that may be used, such as those of a store's index.
        streaming: Whether the answer is streamed.
        resend_limit: Raise ``ResendTooLong`` instead of healing by a full send of more bytes, or blocks.
        tap: Called with each request body, reply body and status.
        before_send: Awaited with each Turn before it is sent.
        output_retries: How often an answer that does not match ``output`` is requested again.
        ephemeral: System text or system blocks of this run only: sent, but not part of the Turn.
        heal: Whether a request that the server cannot continue is sent again in another form; if not, its error is
            raised at once.
        keep_reasoning: Whether to request encrypted reasoning, so that it can be sent again after the server has lost
            a response; Turns and states are smaller without.
        extra_body: Members of the request body that Kedge does not know.
    """

    model: str
    mode: Mode | None
    tools: OfferedTools
    candidates: tuple[AnchorRecord, ...]
    streaming: bool
    resend_limit: int | ResendLimit | None
    tap: WireTap | None
    before_send: BeforeSend | None
    output_retries: int
    ephemeral: EphemeralBlocks
    heal: bool
    keep_reasoning: bool
    extra_body: Mapping[str, Any]


KNOWN_PARAMS = frozenset(BodyParams.__optional_keys__)
"""The names of all body members that a caller may set."""
EXTRA_BODY = "extra_body"
"""The option whose mapping is merged into the request body unchanged."""
OPTION_NAMES = frozenset(RequestOptions.__optional_keys__) - KNOWN_PARAMS - {EXTRA_BODY}
"""The names of the options that are not members of the request body."""


PLANNED_PARAMS: Mapping[str, str] = {
    "previous_response_id": "the plan chooses the anchor from the Turn's records",
    "conversation": "use mode='conversation', or set the state of the Turn",
    "input": "append the blocks to the Turn",
    "messages": "append the blocks to the Turn",
    "instructions": "put a system block at the start of the Turn",
    "system": "put a system block at the start of the Turn",
    "stream": "use streaming=True or streaming=False",
}
"""Body members that follow from the plan, with the alternative to each."""

_PARAM_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def check_params(
    params: Mapping[str, Any],
    *,
    known_options: frozenset[str] = frozenset(),
    foreign: frozenset[str] = frozenset(),
) -> None:
    """Reject parameters that the plan decides, parameters of unknown names, and values that are not JSON.

    This is checked before a run starts: a conversation stores a question before its request is encoded, and
    a question that can never be sent would stay in it as pending.

    Args:
        params: Parameters of a request, or of an engine for all its requests.
        known_options: Further names to suggest for a misspelled one.
        foreign: Names that are not suggested; see ``Engine.foreign_params``.

    Raises:
        UnsupportedParameter: A name is decided by the plan or is unknown.
        InvalidSetting: A value is not JSON.
    """
    members, extra = combine_params(params)
    for name in params:
        if name not in KNOWN_PARAMS and name != EXTRA_BODY:
            from difflib import get_close_matches

            close = get_close_matches(name, (KNOWN_PARAMS | known_options) - foreign, 2)
            hint = f"did you mean {' or '.join(map(repr, close))}? If not, " if close else ""
            raise UnsupportedParameter(
                name,
                f"{hint}use extra_body={{{name!r}: …}} to send a body member of this name",
                f"there is no option {name!r}",
            )
    encode_params({**members, **extra})


def encode_params(members: Mapping[str, Any]) -> bytes:
    """Return members of a body as JSON, without the braces of their object.

    The standard library encodes them, because it rejects values that are not JSON; parameters are arbitrary objects
    of the caller.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    try:
        return _PARAM_ENCODER.encode(members)[1:-1].encode()
    except (TypeError, ValueError, RecursionError) as error:
        for name in members if len(members) > 1 else ():
            encode_params({name: members[name]})  # which names the invalid one
        message = f"{next(iter(members))} cannot be sent as JSON: {error}; pass plain values"
        raise InvalidSetting(message) from error


def combine_params(*groups: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Combine the parameters of an engine and of a request; return them without ``extra_body``, and its members.

    Raises:
        UnsupportedParameter: A parameter or a member of ``extra_body`` is decided by the plan.
    """
    params: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for group in groups:
        members = {**group}
        own = members.pop(EXTRA_BODY, None)
        if not isinstance(own, Mapping | None):
            raise UnsupportedParameter(EXTRA_BODY, "pass a mapping from member names to values")
        params |= members
        extra |= cast("Mapping[str, Any]", own or {})
    for name in PLANNED_PARAMS.keys() & {*params, *extra}:
        problem = f"the plan decides {name!r}, so that it cannot be set"
        raise UnsupportedParameter(name, PLANNED_PARAMS[name], problem)
    return params, extra


ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


MAX_CALL_ID_LENGTH = 64
"""The maximum length of a call id in the Responses API; ids of other providers may be longer."""


def hash_call_id(text: str) -> str:
    """Return a call id that every provider accepts, always the same for a text."""
    return "call_" + hashlib.sha256(text.encode()).hexdigest()[:24]


def build_input(plan: RequestPlan) -> list[dict[str, Any]]:
    """Return the input items of a plan, with shorter ids for calls of other providers where needed.

    A call that the server generated itself is not in the input of the request with its result, which keeps its id.
    """
    items = plan.input()
    shorter: dict[str, dict[str, str]] = {}
    for item in items:
        if item["type"] in CALL_ARGUMENTS and len(item["call_id"]) > MAX_CALL_ID_LENGTH:
            name = hash_call_id(f"kedge.call/1  {item['call_id']}")
            shorter[item["call_id"]] = {"call_id": name}
    return [item | shorter.get(item.get("call_id", ""), {}) for item in items] if shorter else items


_PREFIX = b'"tools":'


def to_definition(members: Mapping[str, Any]) -> FrozenMap:
    """Return the definition of a tool: its members, which cannot be changed and need not be JSON.

    Raises:
        InvalidSetting: They are nested too deep.
    """
    try:
        return wrap_copy(members)
    except RecursionError as error:
        raise InvalidSetting("tools cannot be sent as JSON: one is nested too deep") from error


def encode_tool(tool: object) -> bytes:
    """Return the compact JSON of an element of a body's ``tools``.

    Raises:
        InvalidSetting: A value is not JSON.
    """
    return compute_once(_encode, tool) if type(tool) is FrozenMap else _encode(tool)


def _encode(tool: object) -> bytes:
    return encode_params({"tools": thaw(tool)})[len(_PREFIX) :]


def convert_tool(
    definition: Mapping[str, Any], converter: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> FrozenMap:
    """Return a definition in the form of another API; ``converter`` is a function of the module of that API."""
    return compute_once(_compose(converter), to_definition(definition))


@cache
def _compose(converter: Callable[[Any], Mapping[str, Any]]) -> Callable[[FrozenMap], FrozenMap]:
    return lambda definition: to_definition(converter(definition))


B = TypeVar("B", bound=Block)

Phase = Literal["input", "output"]
"""Content on its way to a model, or on its way from a model to the caller and the store."""
Phases = Iterable[Phase]
BOTH: tuple[Phase, ...] = ("output", "input")


class ContentFilter(Protocol):
    """Edits or rejects content; a middleware lists its filters in ``Engine.content_filters``."""

    @property
    def holds_output(self) -> bool:
        """Whether the content of an answer is shown only when it is complete."""
        ...

    def filter_block(self, block: Block, phase: Phase) -> Block:
        """Return the filtered block; the identical block if nothing changed.

        Raises:
            Blocked: A rule rejects the content.
        """
        ...

    def edit_text(self, text: str) -> str:
        """Return the text without anything that a rule of either phase matches. Never raises."""
        ...


Filters = Iterable[ContentFilter]


class ContentFilters(tuple[ContentFilter, ...]):
    """All content filters of one stack, outermost first, with their cached results for one run.

    Results are cached by block identity: applying the filters at every boundary of a run costs one
    lookup per block, and the same block always becomes the same block, so that a stored prefix is
    recognized as unchanged.
    """

    @cached_property
    def _results(self) -> dict[tuple[int, Phase, int], tuple[Block, Block]]:
        """The results, each with its block, which stays alive, so that its id is not reused."""
        return {}

    def with_filter(self, added: ContentFilter) -> "ContentFilters":
        """Return filters that contain ``added``; the same object if it contains ``added`` already."""
        return self if added in self else ContentFilters((*self, added))

    def apply(self, block: B, phases: Phases = BOTH, filters: Filters | None = None) -> B:
        """Return the block after the filters.

        Args:
            block: The block.
            phases: The directions whose rules apply.
            filters: The filters to apply instead of all.

        Raises:
            Blocked: A rule rejects the content.
        """
        for phase in phases:
            for each in self if filters is None else filters:
                block = self._apply_one(each, block, phase)
        return block

    def apply_to_turn(
        self, turn: Turn, phases: Phases = BOTH, filters: Filters | None = None
    ) -> Turn:
        """Return the Turn with every block filtered; the identical Turn if nothing changed. See ``apply``.

        Raises:
            Blocked: A rule rejects the content.
        """
        chosen = self if filters is None else tuple(filters)
        if not chosen:
            return turn
        return turn.with_blocks(self.apply(block, phases, chosen) for block in turn.blocks)

    def edit_text(self, text: str) -> str:
        """Return the text without anything that a rule matches. Never raises."""
        for each in self:
            text = each.edit_text(text)
        return text

    def _apply_one(self, content_filter: ContentFilter, block: B, phase: Phase) -> B:
        key = (id(content_filter), phase, id(block))
        known = self._results.get(key)
        if known is None:
            result = content_filter.filter_block(block, phase)
            known = self._results[key] = (block, result)
            # A result is final: a replacement that matches its own pattern is not replaced again.
            self._results[id(content_filter), phase, id(result)] = (result, result)
        return cast("B", known[1])  # a filter never changes the kind of a block


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
        given: dict[str, Any] = {}
        params: dict[str, Any] = {}
        for name, value in options.items():
            if name in OPTION_NAMES:
                given[name] = _CONVERTERS[name](value) if name in _CONVERTERS else value
            else:
                params[name] = value
        if params:
            check_params(params, known_options=OPTION_NAMES | {"output"}, foreign=foreign)
        text: Mapping[str, Any] = params.get("text") or {}
        if output is not None and text.get("format"):
            problem = "output= determines text.format"
            raise UnsupportedParameter("text.format", "set one of the two", problem)
        schema = None if output is None else to_output_schema(output)
        return cls(
            params=params, output=schema, filters=ContentFilters(dict.fromkeys(filters)), **given
        )

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


def _join_ephemeral(blocks: EphemeralBlocks) -> str:
    given: Any = blocks
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    listed: list[Any] = [*given] if is_list else [given]
    if not all(isinstance(each, str | SystemBlock) for each in listed):
        remedy = "pass text or system blocks; append other blocks to the Turn"
        raise UnsupportedParameter("ephemeral", remedy)
    return "\n\n".join(each if isinstance(each, str) else each.text for each in listed)


def _define_tools(tools: OfferedTools) -> tuple[Mapping[str, Any], ...]:
    functions, definitions = split_tools(tools)
    if not functions:
        return definitions
    # A toolbox is of a higher layer, which is imported by its name.
    toolbox = import_module("kedge.tools").Toolbox(*functions)
    return (*definitions, *toolbox.frozen_definitions())


def _list_candidates(given: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
    return tuple(list_arguments("candidates", AnchorRecord, given))


def _check_value(name: str, value: Any) -> Any:
    """Return the value of an option, or raise ``InvalidSetting`` if it has another type than in ``RequestOptions``."""
    check_members({name: value}, RequestOptions)
    return value


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "mode": validate_mode,
    "resend_limit": to_resend_limit,
    "output_retries": partial(check_count, "output_retries"),
    "tools": _define_tools,
    "candidates": _list_candidates,
    "tap": lambda tap: None if tap is None else check_callback("tap", tap),
    "before_send": partial(_check_value, "before_send"),
    "heal": partial(_check_value, "heal"),
    "keep_reasoning": partial(_check_value, "keep_reasoning"),
    "model": partial(_check_value, "model"),
    "streaming": partial(_check_value, "streaming"),
    "ephemeral": _join_ephemeral,
}
"""Checks and converts the options that a caller may write in several forms."""


def list_tools(tools: object) -> list[Any]:
    """Return the entries of ``tools``: one function, tool, toolbox or definition is a list of one.

    Raises:
        InvalidSetting: It is neither a list nor one of these.
    """
    if callable(tools) or isinstance(tools, Mapping):
        return [tools]
    if isinstance(tools, str | bytes) or not isinstance(tools, Iterable):
        raise InvalidSetting(
            "tools must be a list of functions, tools, toolboxes and definitions, or one of these, "
            f"not {describe_type(tools)}"
        )
    return list(cast("Iterable[Any]", tools))


_LISTED_OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    "tools": list_tools,
    "candidates": _list_candidates,
    "ephemeral": _join_ephemeral,
}


def list_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that can be read several times: an iterator would be empty the second time."""
    return {
        name: _LISTED_OPTIONS[name](value) if name in _LISTED_OPTIONS else value
        for name, value in options.items()
    }


def split_tools(tools: OfferedTools) -> tuple[list[Any], tuple[Mapping[str, Any], ...]]:
    """Return the tools and functions that a run calls, and the definitions that it only offers."""
    functions: list[Any] = []
    definitions: list[Mapping[str, Any]] = []
    for each in list_tools(tools):
        if not hasattr(each, "definitions") and isinstance(each, Mapping):
            definitions.append(cast("Mapping[str, Any]", each))
        else:  # a function, a tool or a toolbox
            functions.append(each)
    return functions, tuple(definitions)
