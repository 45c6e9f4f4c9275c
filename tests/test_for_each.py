"""Tests of the decorator that runs a test for each row of a table."""

import pytest

from for_each import for_each


def test_every_row_runs_and_an_error_names_its_row() -> None:
    """All rows run up to the first error, whose note has the values."""
    seen: list[tuple[int, str]] = []

    @for_each("number", [1, 2])
    @for_each(("text", "size"), [("a", 1), ("bc", 2)])
    def check(number: int, text: str, size: int) -> None:
        seen.append((number, text))
        assert len(text) == size
        assert number == 1

    with pytest.raises(AssertionError) as exc_info:
        check()
    assert seen == [(1, "a"), (1, "bc"), (2, "a")]
    assert exc_info.value.__notes__ == ["for {'text': 'a', 'size': 1}", "for {'number': 2}"]
    with pytest.raises(AssertionError, match="no values"):
        for_each("number", [])


async def test_a_coroutine_is_awaited_for_every_row() -> None:
    """The rows of an async test run one after another."""
    seen: list[int] = []

    @for_each("number", [1, 2])
    async def check(number: int) -> None:
        seen.append(number)

    await check()
    assert seen == [1, 2]
