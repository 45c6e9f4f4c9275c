"""Counting long texts beside the loop.

The tokens of a megabyte take up to half a second to count, and everybody would wait for it. The counter
remembers what it has counted, and lets other threads run meanwhile; so long texts are counted ahead in a
thread, and whoever counts them later finds them counted. Where there are none, nothing waits.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kedge.tokens import count_text

MIN_THREAD_CHARS = 100_000
"""Characters that are not counted on the loop."""
MAX_SKIPPED_CHARS = 1_024
"""Characters of a text that is not worth to be looked at."""
UNCOUNTED_KEYS = frozenset(
    {"data", "encrypted_content", "file_data", "image_url", "signature", "url"}
)
"""Members that are counted by a fixed estimate, or not at all."""


async def precount_in_thread(value: object) -> None:
    """Count the texts in a value, in a thread if they are long; if not, leave them to others."""
    texts = _collect_texts(value)
    if sum(map(len, texts)) >= MIN_THREAD_CHARS:
        await asyncio.to_thread(_count_texts, texts)


def _collect_texts(value: object) -> list[str]:
    found: list[str] = []
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            if len(each) > MAX_SKIPPED_CHARS:
                found.append(each)
        elif isinstance(each, dict):
            members = cast("dict[str, Any]", each)
            left += [members[name] for name in members if name not in UNCOUNTED_KEYS]
        elif isinstance(each, list | tuple):
            left += cast("Sequence[Any]", each)
    return found


def _count_texts(texts: Sequence[str]) -> None:
    for text in texts:
        count_text(text)
