"""Tests of the practice model's arithmetic, which is bounded and never evaluated as code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.server.practice_model import PracticeRequest, answer
from kedge.server.practice_model.arithmetic import evaluate


def answer_text(sentence: str) -> str:
    (part,) = answer(PracticeRequest([{"role": "user", "content": sentence}])).parts
    assert part.kind == "text"
    return part.text


numbers = st.integers(0, 10_000).map(str) | st.decimals(0, 100, places=2).map(str)
sums = st.recursive(
    numbers,
    lambda inner: (
        st.builds("{} {} {}".format, inner, st.sampled_from("+-*"), inner)
        | st.builds("({})".format, inner)
        | st.builds("-{}".format, inner)
    ),
    max_leaves=8,
)


@given(sums)
def test_an_expression_equals_pythons_result(text: str) -> None:
    """Precedence, parentheses and signs match Python's arithmetic."""
    value = evaluate(text)
    if value is not None:
        assert value == pytest.approx(eval(text))  # noqa: S307


SUM_CASES = [
    ("What is 2+3?", "2+3 = 5."),
    ("what's 3 * 4", "3 * 4 = 12."),
    ("How much is -(1 + 2)?", "-(1 + 2) = -3."),
    ("0.1 + 0.2", "0.1 + 0.2 = 0.3."),
    ("6 / 3", "6 / 3 = 2."),
    ("2 / 3", "2 / 3 = 0.666666666667."),
    ("5 / 0", "Nothing can be divided by zero."),
    ("9" * 190 + " * " + "9", None),
    ("(" * 30 + "1" + ")" * 30 + " + 1", None),
    ("2 ** 3", None),
    ("2 + (3", None),
    ("1 (2)", None),
    ("42", None),
    ("2 + x", None),
    ("2 + " * 100 + "2", None),
    ("__import__('os').getcwd()", None),
]


@for_each(("sentence", "answered"), SUM_CASES)
def test_an_expression_is_evaluated_or_echoed(sentence: str, answered: str | None) -> None:
    """A sentence that is not an expression is echoed like any other message."""
    text = answer_text(sentence)
    if answered is None:
        assert text.startswith("You said: ") or " = " in text
    else:
        assert text == answered
