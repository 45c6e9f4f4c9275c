"""The page about the practice model is true: each of its conversations is held here."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kedge.practice import Ask, Call, Part, Refuse, Reply, Say, Script, Think, answer, model

PAGE = (Path(__file__).parents[2] / "docs" / "practice.md").read_text(encoding="utf-8")


def boxes(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


TOOLS = {tool["name"]: tool for tool in json.loads(boxes("json")[0])}
CONVERSATIONS = boxes("practice")


def lines(box: str) -> Iterator[tuple[str, str]]:
    """Speaker and words of each line; an indented line goes on with the one before."""
    for line in re.sub(r"\n {2}(?=\S)", "\n\t", box).split("\n"):
        if line:
            speaker, _, words = line.partition(": ")
            yield speaker, words


def joined(box: str) -> Iterator[tuple[str, str]]:
    held: list[str] | None = None
    for speaker, words in lines(box):
        if speaker.startswith("\t"):
            assert held is not None
            held[1] += speaker + (f": {words}" if words else "")
            continue
        if held:
            yield held[0], held[1]
        held = [speaker, words]
    if held:
        yield held[0], held[1]


def same(shown: str, given: str) -> bool:
    """A break in the page is a break or a blank in the answer."""
    return re.sub(r"\t", "\n", shown) == given or re.sub(r"\t", " ", shown) == given


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
class Stage:
    """One conversation: the request so far, and the parts of the answer still to be shown."""

    ask: Ask = field(default_factory=lambda: Ask([]))
    reply: Reply = field(default_factory=lambda: Reply(()))
    unshown: list[Part] = field(default_factory=list)
    open_calls: list[str] = field(default_factory=list)
    abouts: set[str] = field(default_factory=set)

    def add(self, **item: Any) -> None:
        self.ask = replace(self.ask, items=[*self.ask.items, item])

    def play(self, speaker: str, words: str) -> None:
        if speaker in SETTINGS:
            self.ask = replace(self.ask, **SETTINGS[speaker](words))
        elif speaker.startswith("model"):
            self.show(speaker, words)
        else:
            assert not self.unshown, f"the page leaves out {self.unshown}"
            self.hear(speaker, words)

    def hear(self, speaker: str, words: str) -> None:
        match speaker:
            case "you":
                self.add(type="message", role="user", content=words)
            case "system":
                self.add(type="message", role="system", content=words)
            case "tool":
                self.add(type="function_call_output", call_id=self.open_calls.pop(0), output=words)
            case _:
                assert speaker == "nothing"

    def show(self, speaker: str, words: str) -> None:
        if not self.unshown:
            self.reply = answer(self.ask)
            self.unshown = list(self.reply.parts)
            heard = model.heard_in(self.ask)
            self.abouts.add(model.respond(heard)[1])
        part = self.unshown.pop(0)
        pace = re.search(r"every ([\d.]+) s", speaker)
        assert self.reply.pace == (float(pace[1]) if pace else 0)
        verb = re.sub(r"model| ?\(.*\)", "", speaker).strip()
        self.keep(verb, words, part)

    def keep(self, verb: str, words: str, part: Part) -> None:
        match verb, part:
            case "thinks", Think(text):
                self.add(type="reasoning", summary=[{"type": "summary_text", "text": text}])
            case "", Say(text):
                self.add(role="assistant", content=[{"type": "output_text", "text": text}])
            case "refuses", Refuse(text):
                self.add(role="assistant", content=[{"type": "refusal", "refusal": text}])
            case "calls", Call(name, arguments, custom):
                text = f"{name} {arguments}"
                self.open_calls.append(f"call_{len(self.ask.items)}")
                kind = "custom_tool_call" if custom else "function_call"
                self.add(type=kind, name=name, arguments=arguments, call_id=self.open_calls[-1])
            case _:
                raise AssertionError(f"shown as {verb!r}: {part}")
        assert same(words, text), f"shown: {words}\ngiven: {text}"


def play(box: str) -> Stage:
    stage = Stage()
    for speaker, words in joined(box):
        stage.play(speaker, words)
    assert not stage.unshown
    return stage


@pytest.mark.parametrize("box", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_the_page_shows_what_the_model_says(box: str) -> None:
    """Every conversation of the page, word for word."""
    play(box)


def test_the_page_shows_every_rule() -> None:
    """A phrase that is not on the page does not exist for anyone."""
    shown = set[str]().union(*(play(box).abouts for box in CONVERSATIONS))
    assert {rule.about for rule in model.RULES} - shown == set()


def test_the_script_of_the_page_is_a_script() -> None:
    """The example loads, and answers as its comments say."""
    script = Script.from_data(tomllib.loads(boxes("toml")[0]))
    reply = script.answer(Ask([{"role": "user", "content": "How is the weather?"}]))
    assert reply.parts[0] == Think("They want the weather.")
    reply = script.answer(Ask([{"role": "user", "content": "My password is 1234"}]))
    assert reply.parts == (Call("shout", "free text, for a custom tool", custom=True),)
