"""Tests of phrase rules."""

import re
import sys

from for_each import for_each
from kedge.server.practice_model.model import RULES
from kedge.server.practice_model.rules import FLAGS, SEARCH_WORDS, PhraseRule
from kedge.server.practice_model.text import fold_case


@for_each("rule", [rule for rule in RULES if rule.is_searched])
def test_searched_phrases_start_with_a_search_word(rule: PhraseRule) -> None:
    """A sentence is only searched for phrases if it has one of these words."""
    first = re.match(r"\\b(?:\(\?:)?(\w+)", rule.pattern.pattern)
    assert first is not None
    assert first[1] in SEARCH_WORDS


def test_folded_text_has_the_letters_that_patterns_match() -> None:
    """Every character that a pattern matches with an ASCII letter in any case becomes that letter."""
    letters = re.compile("[a-z]", FLAGS)
    for code in range(sys.maxunicode + 1):
        if letters.fullmatch(character := chr(code)):
            (folded,) = fold_case(character)
            assert re.fullmatch(folded, character, FLAGS)
            assert folded.isascii()
