"""Tests of the descriptions of exceptions in results and logs."""

import pytest

from for_each import for_each
from kedge.tools.output import MAX_MESSAGE_CHARS, describe_error, locate_error, redact_secrets


@for_each(
    ("text", "expected"),
    [
        ("no such city", "no such city"),
        ("key sk-proj-abcdefgh12345 is bad", "key [redacted] is bad"),
        ("xai-abcdefgh12345", "[redacted]"),
        ("github_pat_11ABCDEFG0123", "[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE is denied", "[redacted] is denied"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
        ('Cookie: a=1; b="2 3"; c=4\nno', "Cookie: [redacted]\nno"),
        ("set-cookie: sid=abc; Path=/; HttpOnly", "set-cookie: [redacted]"),
        ("{'Cookie': 'a=1; b=\\'2', 'Host': 'x'}", "{'Cookie': [redacted], 'Host': 'x'}"),
        ('{"cookie":"a=\\"1\\"; b=2","host":"x"}', '{"cookie":[redacted],"host":"x"}'),
        ("no cookie: the session ended", "no cookie: the session ended"),
        ("sent bearer abcdefghijklmnop, refused", "sent bearer [redacted], refused"),
        ("a basic understanding of bearer tokens", "a basic understanding of bearer tokens"),
        ("postgres://kedge:hunter2@db/x refused", "postgres://[redacted]@db/x refused"),
        ("GET /x?api_key=hunter2&q=1", "GET /x?api_key=[redacted]&q=1"),
        ("{'password': 'hunter 2', 'n': 1}", "{'password': [redacted], 'n': 1}"),
        ("ACCESS_TOKEN=hunter2; n=1", "ACCESS_TOKEN=[redacted]; n=1"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "[redacted]"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- end",
            "[redacted] end",
        ),
        ("remote: Traceback (most recent call last):\n  File", "remote: [traceback left out]"),
        ("expected 3 tokens, got 4", "expected 3 tokens, got 4"),
        ("see https://kedge.example/@someone", "see https://kedge.example/@someone"),
    ],
)
def test_secrets_are_redacted(text: str, expected: str) -> None:
    """Keys, tokens, passwords and tracebacks in a message do not reach the model."""
    assert redact_secrets(text) == expected


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


@for_each(
    ("error", "expected"),
    [
        (ValueError("no such city"), "ValueError: no such city"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (Mute(), "Mute"),
        (
            ExceptionGroup("several", [ValueError("a"), ExceptionGroup("b", [OSError("c")])]),
            "ValueError: a; OSError: c",
        ),
        (ExceptionGroup("twice", [ValueError("a"), ValueError("a")]), "ValueError: a"),
    ],
)
def test_an_exception_is_described_by_type_and_message(error: Exception, expected: str) -> None:
    """An exception group is described by the types and messages of its exceptions."""
    assert describe_error(error) == expected


def test_a_long_message_is_truncated() -> None:
    """A message longer than ``MAX_MESSAGE_CHARS`` is truncated."""
    assert describe_error(ValueError("x" * 10**6)) == f"ValueError: {'x' * MAX_MESSAGE_CHARS} [cut]"


def test_locate_error_returns_the_source_location_without_the_message() -> None:
    """The location has the file name, line and function, without the directory."""
    with pytest.raises(ValueError, match="hush") as error:
        raise ValueError("hush")
    position = locate_error(error.value)
    assert position.startswith("test_output_errors.py:")
    assert position.endswith(
        " in test_locate_error_returns_the_source_location_without_the_message"
    )
    assert locate_error(ValueError("hush")) == "an unknown location"
