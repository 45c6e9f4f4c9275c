import re
from pathlib import Path

from for_each import for_each
from kedge.server import errors


@for_each(("value", "shown"), [("{path}{0}", "{path}{0}"), ("\ud800", r"\ud800")])
def test_values_of_clients_are_shown(value: str, shown: str) -> None:
    """Braces are no template, a lone surrogate is escaped, so that the response is UTF-8, and texts are truncated."""
    error = errors.UNKNOWN_PARAMETER(path=value)
    assert (error.message, error.param) == (f"Unknown parameter: '{shown}'.", shown)
    assert len(errors.PREVIOUS_RESPONSE_NOT_FOUND(id="x" * 100_000).message) < 1_100


PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def test_the_page_lists_exactly_the_messages_of_the_local_server() -> None:
    """The page lists each message for which the hosted API has published none."""
    templates = [each for each in vars(errors).values() if isinstance(each, errors.ErrorTemplate)]
    first = templates.index(errors.PREVIOUS_RESPONSE_UNFINISHED)  # those of the hosted API precede
    expected: list[str] = []
    for template in templates[first:]:
        param = template.param or "null"
        code = template.code or "null"
        expected.append(f"| {template.status} | `{param}` | `{code}` | {template.message} |")
    documented = [
        line
        for line in PAGE.read_text().split("\n## Strictness\n")[1].splitlines()
        if re.match(r"\| \d", line)
    ]
    assert sorted(documented) == sorted(expected)
