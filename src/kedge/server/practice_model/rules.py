"""Phrase rules: a pattern, and the handler that answers a sentence that it matches.

A handler gets the utterance and the match of its pattern. It returns a text, the calls to make, or None if it has no
answer and the next rule applies.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from kedge.server.practice_model.request import OutputPart
from kedge.server.practice_model.text import fold_case
from kedge.server.practice_model.utterance import Utterance

FLAGS = re.IGNORECASE | re.DOTALL
SEARCH_WINDOW = 500
"""A question is at the end of a long message, not in the middle of a pasted text."""
SEARCH_WORDS = ("what", "quote", "repeat", "how", "count", "do", "did")
"""The first words of all phrases that are searched. A sentence without them is not searched ten times."""
SEARCH_WORD = re.compile(rf"\b(?:{'|'.join(SEARCH_WORDS)})\b")


class TextResult(Struct, frozen=True):
    """A text answer; ``value`` is the fact in it, which a JSON answer contains instead of the text."""

    text: str
    value: Any = None
    is_refusal: bool = False


RuleHandler = Callable[[Utterance, "re.Match[str]"], TextResult | tuple[OutputPart, ...] | None]


class PhraseRule(Struct, frozen=True):
    """One phrase: its topic, its pattern, its handler, and whether it may be inside a sentence."""

    description: str
    pattern: re.Pattern[str]
    handler: RuleHandler
    is_searched: bool = False


Handler = TypeVar("Handler", bound=RuleHandler)


class RuleList(list[PhraseRule]):
    """Rules in the order in which they are tried. Its methods are decorators of handlers, applied from below."""

    def prefix(
        self, description: str, pattern: str, *, is_searched: bool = False
    ) -> Callable[[Handler], Handler]:
        """Add a rule for sentences that start with the phrase."""

        def add(handler: Handler) -> Handler:
            self.append(PhraseRule(description, re.compile(pattern, FLAGS), handler, is_searched))
            return handler

        return add

    def search(self, description: str, pattern: str) -> Callable[[Handler], Handler]:
        """Add a rule for sentences that contain the phrase in their last ``SEARCH_WINDOW`` characters.

        The phrase starts with one of the words of ``SEARCH_WORDS``.
        """
        return self.prefix(description, pattern, is_searched=True)


def first_match(
    rules: Sequence[PhraseRule], utterance: Utterance
) -> tuple[TextResult | tuple[OutputPart, ...], str] | None:
    """Try the rules in order, and return the first answer and the topic of its rule."""
    sentence = utterance.sentence
    start = max(0, len(sentence) - SEARCH_WINDOW)
    has_search_word = SEARCH_WORD.search(fold_case(sentence[start:])) is not None

    for rule in rules:
        if not rule.is_searched:
            match = rule.pattern.match(sentence)
        elif has_search_word:
            match = rule.pattern.search(sentence, start)
        else:
            match = None
        if match is None:
            continue
        response = rule.handler(utterance, match)
        if response is not None:
            return response, rule.description
    return None
