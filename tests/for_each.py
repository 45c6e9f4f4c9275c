"""Run a pure test for each value of a table as one item, which pytest collects and sets up once."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def for_each(
    names: str | Sequence[str], values: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test as ``pytest.mark.parametrize`` does; an error has a note with the values that caused it.

    A test whose values need new fixtures is parametrized instead.
    """
    keys = (names,) if isinstance(names, str) else tuple(names)
    table = [
        dict(zip(keys, (row,) if isinstance(names, str) else row, strict=True)) for row in values
    ]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            for row in table:
                with _name_values(row):
                    test(**others, **row)

        @functools.wraps(test)
        async def run_async(**others: Any) -> None:
            for row in table:
                with _name_values(row):
                    await test(**others, **row)

        chosen = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name not in keys]
        setattr(chosen, "__signature__", signature.replace(parameters=others))  # noqa: B010
        return chosen

    assert table, "no values, so nothing would be tested"
    return decorate


@contextmanager
def _name_values(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"for {row!r}"[:1_000])
        raise
