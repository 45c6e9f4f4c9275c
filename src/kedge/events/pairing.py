"""Who is who in two lists of the same things.

A finished response lists its output once more, and not every server lists it under the ids, or in the
places, that it streamed it under. So what is listed is paired with what was streamed by the best key
that both have; what is left over tries the next key; what is left at the end is new.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Listed = TypeVar("Listed")
Known = TypeVar("Known")
Key = tuple[Callable[[Listed], Hashable], Callable[[Known], Hashable]]


def paired(
    listed: Sequence[Listed], known: Sequence[Known], *keys: "Key[Listed, Known]"
) -> list[Known | None]:
    """For each of ``listed`` the one of ``known`` that it is, or ``None``; an empty key is no key."""
    answer: list[Known | None] = [None] * len(listed)
    if not known:  # as in every response that came whole
        return answer
    left_over, unclaimed = list(range(len(listed))), list(range(len(known)))
    for listed_key, known_key in keys:
        waiting: dict[Hashable, deque[int]] = {}
        for at in unclaimed:
            waiting.setdefault(known_key(known[at]), deque()).append(at)
        claimed: set[int] = set()
        for at in left_over:
            key = listed_key(listed[at])
            if key not in (None, "") and (found := waiting.get(key)):
                claimed.add(found[0])
                answer[at] = known[found.popleft()]
        left_over = [at for at in left_over if answer[at] is None]
        unclaimed = [at for at in unclaimed if at not in claimed]
    return answer
