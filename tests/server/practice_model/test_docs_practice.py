"""Tests that run every conversation shown in docs/practice-model.md."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kedge.server.practice_model import (
    OutputPart,
    PracticeOutput,
    PracticeRequest,
    Script,
    answer,
    model,
)
from kedge.server.practice_model.utterance import parse_utterance

PAGE = (Path(__file__).parents[3] / "docs" / "practice-model.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


TOOLS = {tool["name"]: tool for tool in json.loads(code_blocks("json")[0])}
CONVERSATIONS = code_blocks("practice")


def read_lines(example: str) -> Iterator[tuple[str, str]]:
    """Yield the speaker and text of each line; an indented line continues the one before."""
    for line in re.sub(r"\n {2}(?=\S)", "\t", example).split("\n"):
        if line:
            role, _, text = line.partition(": ")
            yield role, text


def is_same_text(expected: str, actual: str) -> bool:
    """Return whether two texts are equal, where a line break of the page may be a space in the answer."""
    return actual in (expected.replace("\t", "\n"), expected.replace("\t", " "))


SETTINGS: dict[str, Any] = {
    "instructions": lambda words: {"instructions": words},
    "tools": lambda words: {"tools": [TOOLS[name] for name in words.split(", ")]},
    "effort": lambda words: {"reasoning": {"effort": words}},
    "format": lambda words: {"text_format": json.loads(words)},
    "parallel_tool_calls": lambda words: {"parallel_tool_calls": json.loads(words)},
    "tool_choice": lambda words: {
        "tool_choice": json.loads(words) if words.startswith("{") else words
    },
}


@dataclass
class DocumentedConversation:
    """A conversation of the page: the request so far, and the parts of the answer still to be compared."""

    ask: PracticeRequest = field(default_factory=lambda: PracticeRequest([]))
    reply: PracticeOutput = field(default_factory=lambda: PracticeOutput(()))
    pending_parts: list[OutputPart] = field(default_factory=list)
    open_calls: list[str] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)

    def add(self, **item: Any) -> None:
        self.ask = replace(self.ask, items=[*self.ask.items, item])

    def run(self, role: str, text: str) -> None:
        if role in SETTINGS:
            self.ask = replace(self.ask, **SETTINGS[role](text))
        elif role.startswith("model"):
            self.check_output(role, text)
        else:
            assert not self.pending_parts, f"the page leaves out {self.pending_parts}"
            self.add_input(role, text)

    def add_input(self, role: str, text: str) -> None:
        match role:
            case "you":
                self.add(type="message", role="user", content=text)
            case "system":
                self.add(type="message", role="system", content=text)
            case "tool":
                self.add(type="function_call_output", call_id=self.open_calls.pop(0), output=text)
            case _:
                assert role == "nothing"

    def check_output(self, role: str, text: str) -> None:
        if not self.pending_parts:
            self.reply = answer(self.ask)
            self.pending_parts = list(self.reply.parts)
            self.topics.add(model.respond(parse_utterance(self.ask))[1])
        part = self.pending_parts.pop(0)
        pace = re.search(r"every ([\d.]+) s", role)
        assert self.reply.pace == (float(pace[1]) if pace else 0)
        verb = re.sub(r"model| ?\(.*\)", "", role).strip()
        self.check_part(verb, text, part)

    def check_part(self, verb: str, expected: str, part: OutputPart) -> None:
        match verb, part:
            case "thinks", OutputPart("reasoning", text):
                self.add(type="reasoning", summary=[{"type": "summary_text", "text": text}])
            case "", OutputPart("text", text):
                self.add(role="assistant", content=[{"type": "output_text", "text": text}])
            case "refuses", OutputPart("refusal", text):
                self.add(role="assistant", content=[{"type": "refusal", "refusal": text}])
            case "calls", OutputPart(kind, arguments, name) if name:
                text = f"{name} {arguments}"
                self.open_calls.append(f"call_{len(self.ask.items)}")
                self.add(type=kind, name=name, arguments=arguments, call_id=self.open_calls[-1])
            case _:
                raise AssertionError(f"shown as {verb!r}: {part}")
        assert is_same_text(expected, text), f"shown: {expected}\ngiven: {text}"


def run_conversation(example: str) -> DocumentedConversation:
    conversation = DocumentedConversation()
    for role, texts in read_lines(example):
        conversation.run(role, texts)
    assert not conversation.pending_parts
    return conversation


def test_the_examples_of_the_page_are_correct() -> None:
    """Every conversation of the page gives exactly the answers shown, and they use every rule of the model."""
    topics = set[str]().union(*(run_conversation(example).topics for example in CONVERSATIONS))
    assert {rule.description for rule in model.RULES} - topics == set()


def test_the_script_of_the_page_is_valid() -> None:
    """The example script loads and answers as its comments say."""
    script = Script.from_data(tomllib.loads(code_blocks("toml")[0]))
    reply = script.answer(PracticeRequest([{"role": "user", "content": "How is the weather?"}]))
    assert reply.parts[0] == OutputPart("reasoning", "They want the weather.")
    reply = script.answer(PracticeRequest([{"role": "user", "content": "My password is 1234"}]))
    assert reply.parts == (OutputPart("custom_tool_call", "free text, for a custom tool", "shout"),)
