"""Tests of streamed Markdown: finished paragraphs are final, and control characters are removed."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from for_each import for_each
from kedge._internal.display import MAX_MARKDOWN_WORK, estimate_markdown_work, sanitize_text
from kedge.cli.chat_output import MarkdownOutput, split_settled
from kedge.events import ReasoningDelta, TextDelta
from kedge.events.run import ToolStarted
from kedge.turns import tool_call


@for_each(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n"),
        ("```\ncode\n\nmore", ""),
        ("```\ncode\n\nmore\n```\n\nafter", "```\ncode\n\nmore\n```\n\n"),
        ("````\n```\n\n````\n\nx", "````\n```\n\n````\n\n"),
    ],
)
def test_settled_text_ends_with_a_blank_line_outside_code(text: str, done: str) -> None:
    """A code block is not split, even if it contains blank lines."""
    assert split_settled(text) == (done, text[len(done) :])


@given(st.text(alphabet="ab\n`~ ", max_size=60), st.integers(0, 60))
def test_settled_text_stays_settled(text: str, cut: int) -> None:
    """The settled text of a prefix is a prefix of the settled text of the complete input."""
    early, _ = split_settled(text[:cut])
    done, rest = split_settled(text)
    assert done + rest == text
    assert done.startswith(early)


def make_output() -> tuple[MarkdownOutput, io.StringIO]:
    """Return an output and the terminal text that it writes."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    return MarkdownOutput(console), screen


def test_answer_is_rendered_as_markdown() -> None:
    """An answer is rendered paragraph by paragraph, and completely at its end."""
    output, screen = make_output()
    for chunk in ("# Ti", "tle\n\nSome **bo", "ld** words.\n\n- a\n- b", ""):
        output.show_event(TextDelta(delta=chunk))
    output.stop()
    rendered = screen.getvalue()
    assert "Title" in rendered
    plain = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", rendered)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    assert lines[-2:] == ["• a", "• b"]
    assert "Some bold words." in lines
    assert "bold**" not in plain


def test_progress_is_a_line_that_disappears(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that loads its model, reasoning and tools are shown while they last; the answer begins in a new line."""
    output, screen = make_output()
    output.start()
    output.show_event(ReasoningDelta(delta="let me see now "))
    assert "about 4 words of reasoning" in screen.getvalue()
    output.show_event(TextDelta(delta="First."))
    output.show_event(ToolStarted(tool_call("look", {"at": "sea"}, call_id="call_1")))
    assert "look" in screen.getvalue()
    output.show_event(TextDelta(delta="Done."))
    output.stop()
    assert "let me see" not in screen.getvalue()
    plain = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", screen.getvalue())
    assert [line.strip() for line in plain.splitlines()][-1] == "Done."
    assert "First.Done." not in plain
    assert capsys.readouterr().out == ""
    assert output.notes.reasoning == "about 4 words of reasoning"
    waiting, screen = make_output()
    waiting.show_wait(2.0)
    waiting.stop()
    assert "the server is loading its model, 2 s" in screen.getvalue()


def test_control_characters_are_not_printed() -> None:
    """A model cannot move the cursor, set the title or clear the screen."""
    assert sanitize_text("a\x1b[2Jb\x07\r\n\tc") == "a�[2Jb��\n\tc"
    assert sanitize_text("plain é 漢") == "plain é 漢"
    output, screen = make_output()
    output.show_event(TextDelta(delta="x \x1b]0;owned\x07 y"))
    output.stop()
    assert "\x1b]0;owned" not in screen.getvalue()


def test_text_with_very_much_syntax_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget an answer is printed as plain text, and the parser reads no more than it allows."""
    parsed: list[int] = []

    def parse(text: str) -> Markdown:
        parsed.append(estimate_markdown_work(text))
        return Markdown(text)

    monkeypatch.setattr("rich.markdown.Markdown", parse)
    output, screen = make_output()
    for _ in range(50):
        output.show_event(TextDelta(delta="![" * 200))
    output.stop()
    assert screen.getvalue().count("![") > 50 * 200
    assert max(parsed) <= MAX_MARKDOWN_WORK
    assert sum(parsed) <= 3 * MAX_MARKDOWN_WORK
