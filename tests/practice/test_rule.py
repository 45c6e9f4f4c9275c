"""Tests of phrase rules."""

import re

import pytest

from kedge.practice.model import RULES
from kedge.practice.rule import SEARCH_WORDS, PhraseRule


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.is_searched])
def test_searched_phrases_start_with_a_search_word(rule: PhraseRule) -> None:
    """A sentence is only searched for phrases if it has one of these words."""
    first = re.match(r"\\b(?:\(\?:)?(\w+)", rule.pattern.pattern)
    assert first is not None
    assert first[1] in SEARCH_WORDS
