"""What people give to a store, checked before it gets there: text that every database can hold."""

from collections.abc import Iterable, Mapping
from typing import Any

from kedge.errors import InvalidSetting
from kedge.turns.frozen import check_text, frozen_map, thaw


def checked_text(text: str, what: str) -> str:
    """A text without NUL, which PostgreSQL cannot hold, and without half characters."""
    if "\0" in check_text(text, what):
        raise InvalidSetting(f"{what} holds a NUL character; leave it out")
    return text


def checked_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Tags: several texts, none of them empty, each once."""
    if isinstance(texts, str):
        raise InvalidSetting("tags are several texts; write them as a list")
    tags = tuple(dict.fromkeys(checked_text(text, "tag") for text in texts))
    if "" in tags:
        raise InvalidSetting("a tag is empty; leave it out")
    return tags


def checked_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data that JSON can say."""
    return thaw(frozen_map(data, "data"))
