"""Compaction: a long context becomes one opaque item that stands for it.

A compaction item carries, sealed, the items that are kept in the place of everything before it:
a note of what was left out (with a summary of it, where the model writes one), as much of the system
text and of the user's earlier messages as fits (the first one before all), and the end of the newest
exchange. From then on a context starts at its newest compaction item.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.server.encrypted_content import ContentCipher
from kedge.server.errors import INVALID_ENCRYPTED_CONTENT
from kedge.server.json_codec import Item
from kedge.server.token_counting import count_items

TRIGGER_TYPE = "compaction_trigger"
MAX_QUOTE_CHARS = 200
"""How much of the last thing that was left out a note quotes."""

RETAINED_ROLES = frozenset({"user", "system", "developer"})


def has_compaction_trigger(items: Sequence[Item]) -> bool:
    """Whether the input ends with a compaction trigger."""
    return bool(items) and items[-1]["type"] == TRIGGER_TYPE


@dataclass(frozen=True, slots=True)
class CompactedContext:
    """What stands for a context: what is kept of it, and a note of what was left out.

    ``summary`` is what the model has to say of that.
    """

    omitted_items: Sequence[Item]
    retained_items: Sequence[Item]
    summary: str = ""

    @property
    def items(self) -> list[Item]:
        """The items that stand for the context, the note first."""
        return [*_build_note(self.omitted_items, self.summary), *self.retained_items]


def compact(items: Sequence[Item], max_tokens: int) -> CompactedContext:
    """Choose what stands for these items, in about ``most`` tokens.

    The newest message of the user is kept however long it is, and so is the end of what came
    after it, cut only where no call loses its output and no item its reasoning.
    """
    start = find_newest_exchange(items)
    asked = [item for item in items[start : start + 1] if item.get("role") == "user"]
    since = items[start + len(asked) :]
    max_tokens -= count_items(asked)
    end = _fit_tail(since, max_tokens)
    max_tokens -= count_items(end)
    kept = _fit_items(
        [item for item in items[:start] if item.get("role") in RETAINED_ROLES], max_tokens
    )
    held = {id(item) for item in (*kept, *asked, *end)}
    left_out = [item for item in items if id(item) not in held]
    return CompactedContext(left_out, [*kept, *asked, *end])


def retain_user_messages(compacted: CompactedContext, items: Sequence[Item]) -> CompactedContext:
    """Retain every message of the user as well, however many tokens they have."""
    retained = {id(item) for item in compacted.retained_items}
    is_retained = [id(item) in retained or item.get("role") == "user" for item in items]
    return CompactedContext(
        [item for item, kept in zip(items, is_retained, strict=True) if not kept],
        [item for item, kept in zip(items, is_retained, strict=True) if kept],
    )


def find_newest_exchange(items: Sequence[Item]) -> int:
    """Find where the newest exchange begins: at the user's last message, or at the beginning."""
    for index in range(len(items) - 1, -1, -1):
        if items[index].get("role") == "user":
            return index
    return 0


def _fit_tail(items: Sequence[Item], max_tokens: int) -> Sequence[Item]:
    """Cut off the longest end that fits, or the shortest there is."""
    tokens = 0
    needed: set[str] = set()
    best: int | None = None
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        tokens += count_items([item])
        if best is not None and tokens > max_tokens:
            break
        needed ^= {item["call_id"]} if "call_id" in item else set()
        if not needed and (index == 0 or items[index - 1]["type"] != "reasoning"):
            best = index
    return items if best is None else items[best:]


def build_compaction_item(
    cipher: ContentCipher, id: str, retained_items: Sequence[Item]
) -> dict[str, Any]:
    """Make the item that carries what was kept."""
    return {"id": id, "type": "compaction", "encrypted_content": cipher.encrypt(retained_items)}


def expand_compaction(cipher: ContentCipher, items: Sequence[Item]) -> Sequence[Item]:
    """Replace a compaction item at the start by the items in it, as a model sees them.

    Raises:
        ApiError: If this server cannot decrypt it, for example because version 0.1 stored it.
    """
    if not items or items[0]["type"] != "compaction":
        return items
    content: str = items[0]["encrypted_content"]
    retained: list[Item] | None = cipher.decrypt(content)
    if not isinstance(retained, list):  # a reasoning item's content can be decrypted, too
        raise INVALID_ENCRYPTED_CONTENT(content=f"{content[:4]}...")
    return [*retained, *items[1:]]


def _fit_items(items: Sequence[Item], max_tokens: int) -> list[Item]:
    """Keep the first item and then the newest ones, as long as they fit, in their order."""
    chosen: set[int] = set()
    for index in [*range(min(1, len(items))), *range(len(items) - 1, 0, -1)]:
        max_tokens -= count_items([items[index]])
        if max_tokens < 0:
            break
        chosen.add(index)
    return [item for index, item in enumerate(items) if index in chosen]


def _build_note(omitted_items: Sequence[Item], summary: str) -> list[Item]:
    if not omitted_items:
        return []
    counts = Counter(item.get("role") or item["type"] for item in omitted_items)
    listed = ", ".join(f"{number} {what}" for what, number in counts.items())
    text = f"Earlier items of this conversation were compacted: {listed}."
    said = [words for item in omitted_items if (words := _assistant_text(item))]
    if summary:
        text += f" In summary: {summary}"
    elif said:
        text += f" The last of them said: {said[-1][:MAX_QUOTE_CHARS]}"
    return [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": text}],
        }
    ]


def _assistant_text(item: Item) -> str:
    if item.get("role") != "assistant":
        return ""
    return " ".join(part.get("text", "") for part in item["content"])
