"""Test the environment variable that disables chaining."""

import pytest

from for_each import for_each
from kedge.evidence.judge import CHAINING_VARIABLE, is_chaining_enabled


@for_each(
    ("value", "is_enabled", "is_known"),
    [
        *((word, True, True) for word in ("1", "true", "YES", " on ", "y", "T", "Enabled")),
        *((word, True, True) for word in ("", "  ")),
        *((word, False, True) for word in ("0", "false", "NO", " off\n", "n", "F", "Disabled")),
        *((word, False, False) for word in ("none", "never", "2", "00", '"1"', "rollback", "-")),
    ],
)
def test_only_a_known_word_keeps_chaining_enabled(
    value: str, is_enabled: bool, is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Known words decide, a blank value is none, and any other word disables chaining and is reported once."""
    caplog.clear()
    for _ in range(3):
        assert is_chaining_enabled({CHAINING_VARIABLE: value}) is is_enabled
    warnings = [] if is_known else [f"{CHAINING_VARIABLE}={value!r}"]
    assert [record.getMessage().split()[0] for record in caplog.records] == warnings


def test_chaining_is_enabled_without_the_variable() -> None:
    """Chaining is enabled if the variable is not set."""
    assert is_chaining_enabled({})
