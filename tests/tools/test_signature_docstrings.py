"""Docstrings in three styles become a description and the meaning of each parameter."""

import pytest

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


def test_google_style_is_understood() -> None:
    """Sections by indentation; types and continued lines are no trouble."""
    read = parse_docstring(GOOGLE)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "How many (at most): a number.",
        "plain": "Without a type.",
    }
    assert read.description == (f'{START}\n\nExamples: look("x")\n\nReturns: What was found.')


def test_numpy_style_is_understood() -> None:
    """Sections by underline; two parameters may share one text."""
    read = parse_docstring(NUMPY)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "Numbers.",
        "plain": "Numbers.",
    }
    assert read.description == (f'{START}\n\nExamples: look("x")\n\nReturns: What was found.')


def test_sphinx_style_is_understood() -> None:
    """Fields between colons; the type may stand before the name."""
    read = parse_docstring(SPHINX)
    assert read.parameters == {
        "query": "What to look for: words. They may be many.",
        "limit": "How many.",
    }
    assert read.description == f"{START}\n\nReturns: What was found."


@pytest.mark.parametrize(
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
def test_what_is_no_section_is_description(text: str | None, description: str) -> None:
    """Prose that only looks like a section is kept as it is."""
    read = parse_docstring(text)
    assert (read.description, read.parameters) == (description, {})


def test_a_section_that_cannot_be_parsed_stays_in_the_description() -> None:
    """Nothing of a docstring is lost to the model."""
    text = "Do.\n\nArgs:\n    All optional\n    x: The x."
    assert parse_docstring(text).description == text
