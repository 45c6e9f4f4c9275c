"""Tests of the signatures that can be tools, of the errors for the others, and of the parsing of docstrings."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self

import pytest

from for_each import for_each
from kedge.errors import InvalidTool
from kedge.tools import signature as signatures
from kedge.tools.signature import ToolArgument, parse_docstring, parse_signature
from kedge.turns import ToolCallBlock

if TYPE_CHECKING:
    from decimal import Decimal


def find(query: Annotated[str, "The words."], limit: int = 3, *, call: ToolCallBlock) -> str:
    """Find it.

    Args:
        query: Not used, the annotation is nearer.
        limit: At most.
    """
    return f"{query} {limit} {call.call_id}"


class Shelf:
    """A shelf that can be asked."""

    def find(self, query: str) -> str:
        """Find it here."""
        return query

    def join(self, other: Self) -> Self:
        """Join two shelves."""
        del other
        return self

    async def __call__(self, query: str) -> str:
        return query


class Silent:
    def __call__(self, query: str) -> str:
        """Find it in silence."""
        return query


def argument_names(function: Any) -> list[str]:
    return [argument.name for argument in parse_signature(function).arguments]


def test_a_signature_becomes_arguments() -> None:
    """Arguments have names, types, defaults and descriptions; the parameter for the call is left out."""
    signature = parse_signature(find)
    assert signature.description == "Find it."
    assert signature.call_parameter == "call"
    assert signature.arguments == (
        ToolArgument("query", Annotated[str, "The words."], description="The words."),
        ToolArgument("limit", int, 3, "At most."),
    )


def test_methods_and_callable_objects_can_be_tools() -> None:
    """``self`` is not an argument; an object is named by its class, and described by it or its method."""
    assert argument_names(Shelf().find) == ["query"]
    assert parse_signature(Shelf().find).description == "Find it here."
    assert signatures.get_function_name(Shelf()) == "Shelf"
    assert signatures.is_async(Shelf())
    assert parse_signature(Shelf()).description == "A shelf that can be asked."
    assert parse_signature(Silent()).description == "Find it in silence."


def test_bound_parameters_of_a_partial_are_not_arguments() -> None:
    """A bound value is not part of the signature, not even as a default."""

    async def fetch(url: str, api_key: str, tries: int = 1) -> str:
        """Fetch it."""
        return f"{url} {api_key} {tries}"

    bound = functools.partial(fetch, api_key="sk-secret")
    signature = parse_signature(bound)
    assert signatures.get_function_name(bound) == "fetch"
    assert signatures.is_async(bound)
    assert signature.description == "Fetch it."
    assert argument_names(bound) == ["url", "tries"]
    assert "sk-secret" not in repr(signature)
    assert argument_names(functools.partial(fetch, "https://kedge.example")) == ["api_key", "tries"]


def test_a_decorated_function_has_its_original_signature() -> None:
    """The signature of a wrapper made with ``functools.wraps`` is that of the wrapped function."""

    @functools.wraps(find)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return find(*args, **kwargs)

    assert parse_signature(wrapper) == parse_signature(find)


def positional(x: int, /) -> None: ...
def many(*xs: int) -> None: ...
def named(**xs: int) -> None: ...
def untyped(x) -> None: ...
def unresolved(x: "Decimal") -> None: ...
def annotate(annotation: Any) -> Callable[..., None]:
    """Return a function whose parameter has this annotation."""

    def annotated(x: int) -> None: ...

    annotated.__annotations__["x"] = annotation
    return annotated


def generator() -> Iterator[int]:
    yield 1


REJECTED: list[tuple[Any, str]] = [
    (positional, "positional cannot be a tool: parameter x is positional-only"),
    (many, "parameter xs accepts any number of values; use a list"),
    (named, "parameter xs accepts any names"),
    (untyped, "parameter x has no type; annotate it"),
    (unresolved, "the annotation 'Decimal' cannot be resolved"),
    (annotate(""), "its annotations cannot be evaluated: "),
    (annotate("1 / 0"), "its annotations cannot be evaluated: ZeroDivisionError"),
    (annotate(Self), "annotated cannot be a tool: parameter x is annotated with Self; name its"),
    (Shelf().join, "join cannot be a tool: parameter other is annotated with Self"),
    (generator, "it is a generator"),
    (Shelf, "Shelf cannot be a tool: it is a class; pass a function"),
    (Shelf.find, "it is an unbound method; pass object.method"),
    ("find", "it is of type str; pass a function"),
    (max, "its signature is not available"),
    (math.sqrt, "parameter x is positional-only"),
]


@for_each(("function", "message"), REJECTED)
def test_functions_that_cannot_be_tools_are_rejected(
    function: Callable[..., Any], message: str
) -> None:
    """The error names the function, the parameter and the correction."""
    with pytest.raises(InvalidTool) as error:
        parse_signature(function)
    assert message in str(error.value)


GOOGLE = """Look something up.

    It may take a while.

    Args:
        query (str): What to look for: words.
            They may be many.
        *limit (Callable[[int], str], optional): How many (at most): a number.
        plain: Without a type.

    Returns:
        What was found.

    Raises:
        LookupError: When nothing was.

    Example:
        look("x")
    """
NUMPY = """Look something up.

    It may take a while.

    Parameters
    ----------
    query : str
        What to look for: words.
        They may be many.
    limit, plain: int
        Numbers.

    Returns
    -------
    What was found.

    Raises
    ------
    LookupError
        When nothing was.

    Example
    -------
    look("x")
    """
SPHINX = """Look something up.

    It may take a while.

    :param query: What to look for: words.
        They may be many.
    :param int limit: How many.
    :type query: str
    :returns: What was found.
    :rtype: str
    :raises LookupError: When nothing was.
    """
SUMMARY = "Look something up.\n\nIt may take a while."
EXAMPLES = '\n\nExamples: look("x")'
LIMIT = "How many (at most): a number."


@for_each(
    ("docstring", "parameters", "description"),
    [
        # Sections are found by indentation, with types and continuation lines.
        (GOOGLE, {"limit": LIMIT, "plain": "Without a type."}, SUMMARY + EXAMPLES),
        # Sections are found by their underlines, and two parameters may share a description.
        (NUMPY, {"limit": "Numbers.", "plain": "Numbers."}, SUMMARY + EXAMPLES),
        # Fields are found between colons, and a type may precede the name.
        (SPHINX, {"limit": "How many."}, SUMMARY),
    ],
)
def test_three_styles_of_docstrings_are_parsed(
    docstring: str, parameters: dict[str, str], description: str
) -> None:
    """The parameters get their descriptions, and examples and results stay in that of the tool."""
    read = parse_docstring(docstring)
    query = "What to look for: words. They may be many."
    assert read.parameters == {"query": query, **parameters}
    assert read.description == f"{description}\n\nReturns: What was found."


@for_each(
    ("text", "description"),
    [
        (None, ""),
        ("One line.", "One line."),
        ("Args: none to speak of.", "Args: none to speak of."),
        ("Do it.\n\nArgs:\nnot indented", "Do it.\n\nArgs:\nnot indented"),
        ("See :class:`Thing` for more.", "See :class:`Thing` for more."),
        (":unknown field: stays", "Unknown field: stays"),
        ("Do it.\n\n: :param x: y\n", "Do it.\n\n: :param x: y"),
        ("Do.\n\nReturns:\n    A.\n\nMore\nprose.", "Do.\n\nMore\nprose.\n\nReturns: A."),
        ("\nReturns:\n    A thing.\nEnd.", "End.\n\nReturns: A thing."),
        (
            "Do.\n\nArgs:\n    All optional\n    x: The x.",
            "Do.\n\nArgs:\n    All optional\n    x: The x.",
        ),
    ],
)
def test_text_that_is_not_a_section_is_description(text: str | None, description: str) -> None:
    """Text that only resembles a section remains in the description."""
    read = parse_docstring(text)
    assert (read.description, read.parameters) == (description, {})
