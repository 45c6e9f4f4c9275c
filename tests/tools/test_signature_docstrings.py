"""Tests of the parsing of docstrings in Google, NumPy and Sphinx style."""

from for_each import for_each
from kedge.tools.signature import parse_docstring

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
START = "Look something up.\n\nIt may take a while."


def test_google_style_is_parsed() -> None:
    """Sections are found by indentation, with types and continuation lines."""
    read = parse_docstring(GOOGLE)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "How many (at most): a number.",
        "plain": "Without a type.",
    }
    assert read.description == (f'{START}\n\nExamples: look("x")\n\nReturns: What was found.')


def test_numpy_style_is_parsed() -> None:
    """Sections are found by their underlines, and two parameters may share a description."""
    read = parse_docstring(NUMPY)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "Numbers.",
        "plain": "Numbers.",
    }
    assert read.description == (f'{START}\n\nExamples: look("x")\n\nReturns: What was found.')


def test_sphinx_style_is_parsed() -> None:
    """Fields are found between colons, and a type may precede the name."""
    read = parse_docstring(SPHINX)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "How many.",
    }
    assert read.description == f"{START}\n\nReturns: What was found."


@for_each(
    ("text", "description"),
    [
        (None, ""),
        ("", ""),
        ("One line.", "One line."),
        ("Args: none to speak of.", "Args: none to speak of."),
        ("Do it.\n\nArgs:\nnot indented", "Do it.\n\nArgs:\nnot indented"),
        ("Do it.\n\nArgs:", "Do it.\n\nArgs:"),
        ("See :class:`Thing` for more.", "See :class:`Thing` for more."),
        (":unknown field: stays", "Unknown field: stays"),
        ("Do it.\n\n: :param x: y\n", "Do it.\n\n: :param x: y"),
        (
            "Do.\n\nReturns:\n    A thing.\n\nMore\nprose.",
            "Do.\n\nMore\nprose.\n\nReturns: A thing.",
        ),
        ("\nReturns:\n    A thing.\nEnd.", "End.\n\nReturns: A thing."),
    ],
)
def test_text_that_is_not_a_section_is_description(text: str | None, description: str) -> None:
    """Text that only resembles a section remains in the description."""
    read = parse_docstring(text)
    assert (read.description, read.parameters) == (description, {})


def test_a_section_that_cannot_be_parsed_stays_in_the_description() -> None:
    """The description contains a section that cannot be parsed."""
    text = "Do.\n\nArgs:\n    All optional\n    x: The x."
    assert parse_docstring(text).description == text
