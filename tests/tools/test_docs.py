"""The page about tools says what is true."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any, get_args

from kedge.tools import Outcome
from kedge.tools.tool import Terms

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def test_every_snippet_runs_and_prints_what_the_page_says() -> None:
    """One after the other, as a reader would type them."""
    snippets = SNIPPET.findall(PAGE.read_text())
    assert len(snippets) == 5
    names: dict[str, Any] = {}
    for code, printed in snippets:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, PAGE.name, "exec"), names)  # noqa: S102 - our own page
        assert output.getvalue() == printed


def test_every_option_and_outcome_is_on_the_page() -> None:
    """What can be said about running a tool, and what can become of a call."""
    page = PAGE.read_text()
    for word in (*Terms.__annotations__, *get_args(Outcome)):
        assert f"`{word}`" in page
