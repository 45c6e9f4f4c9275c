r"""Characters that a stream has torn in two.

JSON may write an emoji as two escapes, ``\ud83d\ude00``, and a server that streams token by token may
send the first half in one delta and the second in the next. Each half alone is a lone surrogate, which
no UTF-8 wire can carry and which blocks refuse. ``SplitCharacters`` holds a first half back until its
second half arrives; ``mended`` cleans values that are already whole.
"""

from typing import Any, cast

REPLACEMENT = "\ufffd"
"""The character that takes the position of a lone surrogate."""


def has_surrogates(text: str) -> bool:
    """Whether the text holds surrogates."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def join_surrogates(text: str) -> str:
    """Two halves that meet become one character; a lone half becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def repair_surrogates(value: Any) -> Any:
    """The same JSON value with all its texts and keys mended."""
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
    """Deltas in, deltas out, with torn characters put together; one stream of text per key."""

    __slots__ = ("_pending", "_replaced")

    def __init__(self) -> None:
        self._pending: dict[object, str] = {}
        self._replaced = False

    @property
    def replaced(self) -> bool:
        """Whether a lone surrogate was replaced by U+FFFD, or is still waiting for its other half."""
        return self._replaced or bool(self._pending)

    def feed(self, key: object, delta: str) -> str:
        """What can be said of this text by now; empty if it is only a first half."""
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
        """This text is over; a half that still waits has no second one."""
        self._pending.pop(key, None)
