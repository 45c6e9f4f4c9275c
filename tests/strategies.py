"""Hypothesis strategies for the values of Kedge, including edge cases."""

import string
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    ImagePart,
    OpaqueBlock,
    OpaquePart,
    Part,
    ReasoningBlock,
    RefusalPart,
    Source,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.blocks import IDENTITY_FIELDS, KNOWN_KINDS, KnownBlock
from kedge.turns.frozen_json import MAX_INTEGER_BITS
from kedge.turns.parts import PART_TYPES
from kedge.turns.turn import TURN_MEMBERS

Strategy = st.SearchStrategy

BASE_EXAMPLES = 30
"""The number of examples of a test in ``make test``, unless the test sets another."""


def scale_examples(count: int) -> int:
    """Return the number of examples for a test that has this many in ``make test``."""
    profile = settings.default
    assert profile
    return count * profile.max_examples // BASE_EXAMPLES


# Names that are not allowed for a member of `extra`, of an unknown block or of an opaque part.
RESERVED_NAMES = frozenset(
    {
        "kind",
        "type",
        *TURN_MEMBERS,
        *(
            n
            for s in (*KnownBlock.__args__, *PART_TYPES)
            for n in s.__struct_fields__
            if n != "extra"
        ),
    }
)

ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "\r\n",
    "\u2028\u2029",
    "\ufeff",
    "\u202egnirts",
    "é",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "\U0001d518",
    "\U0010ffff",
    '"\\/',
    "null",
    "true",
    "NaN",
    "1",
    "[]",
    "{}",
]


@cache
def texts(*, min_size: int = 0) -> Strategy[str]:
    """Generate texts of every plane of Unicode, including those that parsers often get wrong."""
    odd = st.sampled_from([text for text in ODD_TEXTS if len(text) >= min_size])
    return st.one_of(
        st.text(string.ascii_letters, min_size=min_size, max_size=8),
        odd,
        st.text(min_size=min_size, max_size=12),
    )


@cache
def integers() -> Strategy[int]:
    """Generate integers of every size that Kedge supports."""
    largest = (1 << MAX_INTEGER_BITS) - 1
    edges = [1 << 53, (1 << 53) + 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64, largest, -largest]
    return st.one_of(st.integers(), st.sampled_from(edges))


@cache
def numbers() -> Strategy[float]:
    """Generate finite floats, which JSON can represent."""
    return st.floats(allow_nan=False, allow_infinity=False)


@cache
def json_values() -> Strategy[Any]:
    """Generate JSON values as Python objects."""
    scalars = st.one_of(st.none(), st.booleans(), integers(), numbers(), texts())
    return st.recursive(scalars, _containers, max_leaves=4)


def _containers(children: Strategy[Any]) -> Strategy[Any]:
    return st.lists(children, max_size=2) | st.dictionaries(texts(), children, max_size=2)


@cache
def json_objects(*, without: frozenset[str] = frozenset()) -> Strategy[dict[str, Any]]:
    """Generate JSON objects without members of the given names."""
    names = texts().filter(lambda name: name not in without)
    return st.dictionaries(names, json_values(), max_size=2)


@cache
def extras() -> Strategy[dict[str, Any]]:
    """Generate members that this version of Kedge does not know."""
    return st.just({}) | st.just({}) | json_objects(without=RESERVED_NAMES)


@cache
def text_parts() -> Strategy[TextPart]:
    return st.builds(TextPart, texts(), extra=extras())


@cache
def refusal_parts() -> Strategy[RefusalPart]:
    return st.builds(RefusalPart, texts(), extra=extras())


@cache
def image_parts() -> Strategy[ImagePart]:
    details = st.sampled_from(["auto", "low", "high", "original", "new"])
    by_url = st.builds(ImagePart, url=texts(min_size=1), detail=details, extra=extras())
    return by_url | st.builds(ImagePart, file_id=texts(min_size=1), detail=details, extra=extras())


@cache
def file_parts() -> Strategy[FilePart]:
    by_url = st.builds(FilePart, url=texts(min_size=1), filename=texts(), extra=extras())
    by_data = st.builds(FilePart, data=texts(min_size=1), filename=texts(), extra=extras())
    return by_url | by_data | st.builds(FilePart, file_id=texts(min_size=1), extra=extras())


@cache
def opaque_parts() -> Strategy[OpaquePart]:
    """Generate parts of unknown types."""
    types = texts().map("new_{}".format)
    return st.builds(
        lambda kind, rest: OpaquePart({**rest, "type": kind}),  # pyright: ignore[reportArgumentType]
        types,
        json_objects(),
    )


@cache
def input_parts() -> Strategy[Part]:
    """Generate parts of user messages and tool results."""
    return st.one_of(text_parts(), image_parts(), file_parts(), opaque_parts())


@cache
def output_parts() -> Strategy[Any]:
    """Generate parts of a model's messages."""
    return st.one_of(text_parts(), refusal_parts(), opaque_parts())


@cache
def _identity_fields() -> dict[str, Strategy[Any]]:
    return {
        "id": st.just("") | texts(min_size=1),
        "metadata": st.just({}) | json_objects(without=frozenset(Source.__struct_fields__)),
        "origin": st.sampled_from(["user", "engine", "repair", ""]),
        "source": st.none()
        | st.builds(Source, texts(), texts(), st.none() | st.integers(0, 1 << 70)),
        "extra": extras(),
    }


@cache
def user_blocks() -> Strategy[UserBlock]:
    return st.builds(UserBlock, st.lists(input_parts(), max_size=2), **_identity_fields())


@cache
def assistant_blocks() -> Strategy[AssistantBlock]:
    return st.builds(AssistantBlock, st.lists(output_parts(), max_size=2), **_identity_fields())


@cache
def system_blocks() -> Strategy[SystemBlock]:
    roles = st.sampled_from(["system", "developer"])
    return st.builds(SystemBlock, texts(), roles, **_identity_fields())


@cache
def tool_call_blocks() -> Strategy[ToolCallBlock]:
    return st.builds(
        ToolCallBlock, texts(), texts(), texts(min_size=1), st.booleans(), **_identity_fields()
    )


@cache
def tool_result_blocks() -> Strategy[ToolResultBlock]:
    parts = st.lists(input_parts(), max_size=2)
    return st.builds(ToolResultBlock, texts(min_size=1), parts, st.booleans(), **_identity_fields())


@cache
def reasoning_blocks() -> Strategy[ReasoningBlock]:
    several = st.lists(texts(), max_size=2)
    return st.builds(ReasoningBlock, several, several, texts(), **_identity_fields())


@cache
def opaque_items() -> Strategy[dict[str, Any]]:
    """Generate items of a provider whose types Kedge does not interpret."""
    types = st.sampled_from(
        [
            "web_search_call",
            "file_search_call",
            "compaction",
            "item_reference",
            "local_shell_call",
            "apply_patch_call_output",
        ]
    )
    named = st.fixed_dictionaries(
        {"type": types | texts().map("new_{}".format)},
        optional={"id": texts(), "status": st.sampled_from(["completed", "failed", None])},
    )
    return st.builds(lambda named, rest: {**rest, **named}, named, json_objects())


@cache
def opaque_blocks() -> Strategy[OpaqueBlock]:
    return st.builds(OpaqueBlock, opaque_items(), **_identity_fields())


@cache
def unknown_blocks() -> Strategy[UnknownBlock]:
    """Generate blocks of kinds that a newer version of Kedge may have."""
    identity = {name: each for name, each in _identity_fields().items() if name != "extra"}
    kinds = texts().filter(lambda kind: kind not in KNOWN_KINDS)
    rest = json_objects(without=IDENTITY_FIELDS)
    forms = st.builds(lambda kind, rest: {**rest, "kind": kind}, kinds, rest)
    return st.builds(UnknownBlock, forms, **identity)


@cache
def known_blocks() -> Strategy[Block]:
    """Generate blocks of every kind that can be sent."""
    return st.one_of(
        user_blocks(),
        assistant_blocks(),
        system_blocks(),
        tool_call_blocks(),
        tool_result_blocks(),
        reasoning_blocks(),
        opaque_blocks(),
    )


@cache
def blocks() -> Strategy[Block]:
    """Generate blocks of every kind."""
    return known_blocks() | unknown_blocks()


@cache
def turns(of: Strategy[Block] | None = None, *, max_size: int = 3) -> Strategy[Turn]:
    """Generate turns of these blocks, or of blocks of every kind, with data and unknown members."""
    listed = st.lists(of or blocks(), max_size=max_size, unique_by=lambda block: block.id)
    ids = st.just("") | texts(min_size=1)
    return st.builds(Turn, listed, id=ids, data=json_objects(), extra=extras())


def sample_blocks() -> Sequence[Block]:
    """Return one simple block of every kind."""
    return (
        UserBlock((TextPart("hello"), ImagePart("https://example.com/a.png"))),
        AssistantBlock((TextPart("hi"), RefusalPart("no"))),
        SystemBlock("be brief"),
        ToolCallBlock("f", "{}", "call_1"),
        ToolResultBlock("call_1", (TextPart("42"), FilePart(file_id="file_1"))),
        ReasoningBlock(("a summary",), ("a text",), "sealed"),
        OpaqueBlock({"type": "web_search_call", "action": {"query": "x"}}),  # pyright: ignore[reportArgumentType]
        UnknownBlock({"kind": "dream", "depth": 3}),  # pyright: ignore[reportArgumentType]
    )
