"""Tests of the lines that a chat prints in addition to the answer."""

import re
from pathlib import Path

import click
import pytest

from for_each import for_each
from kedge.cli.chat_output import TextOutput, format_event
from kedge.cli.chat_tools import load_tool
from kedge.cli.show import print_blocks
from kedge.events import RefusalDelta, TextDelta
from kedge.events.run import FellBack, Healed, ServerForgot, ToolFinished
from kedge.turns import assistant, opaque, reasoning, tool_call, tool_result, user

TOOL_CALL = tool_call("look", {"at": "\x1b[2J sea"}, call_id="call_1")


def test_events_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Tool calls, healed, resent and lost responses are one line each, on a line of their own."""
    result = tool_result("call_1", "x" * 100 + "\nsecond line")
    line = format_event(ToolFinished(TOOL_CALL, result))
    assert line.startswith("[look {")
    assert line.endswith("…]")
    assert "second" not in line
    assert "\x1b" not in line
    assert format_event(ToolFinished(TOOL_CALL, tool_result("call_1", " "))).endswith("-> ]")
    for event in (Healed("gone"), FellBack("expired"), ServerForgot("resp_1")):
        assert re.fullmatch(r"\[[^\n]+\]", format_event(event))
    assert format_event(TextDelta("x")) == ""
    output = TextOutput()
    output.show_event(RefusalDelta("I cannot"))
    output.show_event(Healed("gone"))
    output.stop()
    assert capsys.readouterr().out == f"I cannot\n{format_event(Healed('gone'))}\n"


def test_show_collapses_and_expands_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasoning, tool calls and results are one line each, or complete with ``--full``."""
    blocks = [
        user("Look.", origin="guard"),
        reasoning(summary=["Where is it?"]),
        TOOL_CALL,
        tool_result("call_1", "The sea.\nAll of it."),
        opaque({"type": "web_search_call", "id": "ws_1"}),
        reasoning(encrypted_content="sealed"),
        assistant("I see the sea."),
    ]
    print_blocks(blocks, full=False)
    brief = capsys.readouterr().out
    assert "You (by guard)" in brief
    assert "[tool call: " in brief
    assert "\x1b" not in brief
    print_blocks(blocks, full=True)
    text = capsys.readouterr().out
    assert "Where is it?" in text
    assert "The sea.\nAll of it." in text
    assert "(encrypted)" in text
    assert "sealed" not in text


@for_each(
    ("path", "message"),
    [
        ("nothing", "module:function"),
        (":f", "module:function"),
        ("no_such_module_here:f", "cannot import"),
        ("tool_with_syntax_error:f", "cannot import .*: SyntaxError"),
        ("json:nothing", "has no function"),
        ("json:dump_", "did you mean 'dumps'|did you mean 'dump'"),
        ("json:__name__", "has no function"),
    ],
)
def test_invalid_tool_is_rejected_with_message(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is missing and how to name a tool."""
    (tmp_path / "tool_with_syntax_error.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(click.BadParameter, match=message):
        load_tool(path)
