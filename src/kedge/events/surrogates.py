r"""Join surrogate pairs that a stream splits across deltas, and replace lone surrogates.

JSON may write an emoji as two escapes, ``\ud83d\ude00``, and a server that streams token by token may
send the first half in one delta and the second in the next. Each half alone is a lone surrogate, which
cannot be encoded as UTF-8 and which blocks reject. ``SurrogateJoiner`` holds a first half back until its
second half arrives; ``repair_surrogates`` replaces lone halves in values that are complete.
"""

from typing import Any, cast

REPLACEMENT = "\ufffd"
"""The character that replaces a lone surrogate."""


def has_surrogates(text: str) -> bool:
    """Return whether the text holds surrogates."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def join_surrogates(text: str) -> str:
    """Join adjacent surrogate pairs, and replace lone surrogates by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def repair_surrogates(value: Any) -> Any:
    """Return a JSON value with the surrogates of all its texts and keys joined or replaced."""
    if isinstance(value, str):
        return join_surrogates(value) if has_surrogates(value) else value
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            repair_surrogates(key): repair_surrogates(member) for key, member in members.items()
        }
    if isinstance(value, list):
        return [repair_surrogates(member) for member in cast("list[Any]", value)]
    return value


class SurrogateJoiner:
    """Joins surrogate pairs across the deltas of a text; each key is a text of its own."""

    __slots__ = ("_pending", "_replaced")

    def __init__(self) -> None:
        self._pending: dict[object, str] = {}
        self._replaced = False

    @property
    def replaced(self) -> bool:
        """Whether a lone surrogate was replaced by U+FFFD, or is still waiting for its other half."""
        return self._replaced or bool(self._pending)

    def feed(self, key: object, delta: str) -> str:
        """Return the delta to emit now; empty if it is only the first half of a character."""
        if not self._pending and not has_surrogates(delta):
            return delta
        text = self._pending.pop(key, "") + delta
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._pending[key] = text[-1]
            text = text[:-1]
        repaired = repair_surrogates(text)
        if repaired.count(REPLACEMENT) > text.count(REPLACEMENT):
            self._replaced = True
        return repaired

    def discard(self, key: object) -> None:
        """Drop a pending half of a text whose complete version has arrived."""
        self._pending.pop(key, None)
