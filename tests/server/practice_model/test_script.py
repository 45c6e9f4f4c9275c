"""Tests of script files, which define the answers of the practice model."""

import json
from pathlib import Path
from typing import Any

import pytest

from for_each import for_each
from kedge.errors import InvalidScript
from kedge.server.practice_model import OutputPart, PracticeOutput, PracticeRequest, Script, answer

TOML = """
[[answers]]
when = "weather"
think = "They want the weather."
call = { name = "get_weather", arguments = { city = "Paris" } }

[[answers]]
after = "get_weather"
say = "Sunny."
pace = 0.5

[[answers]]
turn = 2
refuse = "Not twice."

[[answers]]
sees = "secret"
call = [{ name = "shout", input = "psst" }, { name = "f", arguments = "{}" }]
"""


def user_item(text: str) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": text}


@pytest.fixture
def script(tmp_path: Path) -> Script:
    path = tmp_path / "script.toml"
    path.write_text(TOML)
    return Script.load(path)


CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"}
FIRST = {"type": "message", "role": "assistant", "content": "First."}
WEATHER = (
    OutputPart("reasoning", "They want the weather."),
    OutputPart("function_call", json.dumps({"city": "Paris"}), "get_weather"),
)
CALLS = (OutputPart("custom_tool_call", "psst", "shout"), OutputPart("function_call", "{}", "f"))
CASES: list[tuple[list[Any], PracticeOutput]] = [
    # ``when`` searches for a text in the newest user message, ignoring case.
    ([user_item("How is the WEATHER?")], PracticeOutput(WEATHER)),
    # ``after`` matches if the context ends with the result of that tool.
    ([user_item("Go."), CALL, RESULT], PracticeOutput((OutputPart("text", "Sunny."),), pace=0.5)),
    (  # ``turn`` counts the answers in the context, one for each run of the model's items
        [user_item("One."), {"type": "reasoning", "summary": []}, FIRST, user_item("Two.")],
        PracticeOutput((OutputPart("refusal", "Not twice."),)),
    ),
    # ``sees`` searches all messages; an answer may have several calls, also custom ones.
    ([user_item("A secret."), user_item("Hello.")], PracticeOutput(CALLS)),
    ([user_item("Hello.")], answer(PracticeRequest([user_item("Hello.")]))),
]


@for_each(("items", "output"), CASES)
def test_the_first_answer_that_applies_is_given(
    script: Script, items: list[Any], output: PracticeOutput
) -> None:
    """If no answer of the script applies, the practice model answers."""
    assert script.answer(PracticeRequest(items)) == output


INVALID_SCRIPTS: list[tuple[object, str]] = [
    ([], "s is not valid: Expected `object`"),
    ({}, "missing required field `answers`"),
    ({"answers": ["hi"]}, "Expected `object`, got `str` - at `$.answers[0]`"),
    ({"answers": [{"say": "a"}, {"sya": "b"}]}, "unknown field `sya` - at `$.answers[1]`"),
    ({"answers": [{"turn": True, "say": "a"}]}, "got `bool` - at `$.answers[0].turn`"),
    ({"answers": [{"when": "a"}]}, "no answer; add think, say, refuse or call - at `$.answers[0]`"),
    ({"answers": [{"say": "a", "pace": -1}]}, ">= 0.0 - at `$.answers[0].pace`"),
    ({"answers": [{"call": [{"name": "f", "arguments": 1}]}]}, "at `$.answers[0].call[0].arguments`"),
    ({"answers": [{"call": {"name": "f", "input": "", "arguments": ""}}]}, "not both"),
]  # fmt: skip


@for_each(("data", "message"), INVALID_SCRIPTS)
def test_an_invalid_script_is_rejected(data: object, message: str) -> None:
    """The error names the position in the script and the expected value."""
    with pytest.raises(InvalidScript) as error:
        Script.from_data(data, "s")
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file and an invalid one raise the same error, with the path; a file may be JSON."""
    path = tmp_path / "script.json"
    path.write_text('{"answers": [{"say": "Hi."}]}')
    expected = PracticeOutput((OutputPart("text", "Hi."),))
    assert Script.load(path).answer(PracticeRequest([])) == expected
    with pytest.raises(InvalidScript, match=r"none\.json cannot be read"):
        Script.load(tmp_path / "none.json")
    broken = tmp_path / "broken.toml"
    broken.write_text("answers = [")
    with pytest.raises(InvalidScript, match=r"broken\.toml is not valid"):
        Script.load(broken)
