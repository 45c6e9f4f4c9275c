"""Compare the blocks of two branches: aligned by content, and word by word where a text was changed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq
from typing import Literal

from markupsafe import Markup, escape

from kedge.turns import AssistantBlock, Block, SystemBlock, UserBlock, dump_block
from kedge.turns.frozen_json import EMPTY
from kedge.turns.text_format import describe_change
from kedge.web.transcript import MessageView, MessageViews

MAX_WORDS = 2_000
"""The number of words above which a changed text is not compared word by word."""
MAX_PAGE_WORDS = 20_000
"""The number of words of all texts that are compared word by word, on each side."""
MAX_BLOCKS = 400
"""The number of differing blocks on a side above which they are not aligned."""
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
_DELETED = Markup("<del>{}</del>")
_INSERTED = Markup("<ins>{}</ins>")
Opcode = tuple[str, int, int, int, int]
"""How a range of one sequence becomes a range of another one: the kind of change, and both ranges."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Blocks of two paths: the same in both, changed, or only in one of them."""

    kind: Literal["same", "changed", "left", "right"]
    left: tuple[MessageView, ...] = ()
    right: tuple[MessageView, ...] = ()


def block_text(block: Block) -> str:
    """Return the text of a message, or an empty text for other blocks."""
    if isinstance(block, UserBlock | AssistantBlock | SystemBlock):
        return block.text
    return ""


def build_diff(
    left: Sequence[Block], right: Sequence[Block], models: Mapping[str, str] = EMPTY
) -> tuple[tuple[DiffRow, ...], int]:
    """Return the differences of two paths, and the number of blocks that are the same.

    Args:
        left: The blocks of one path.
        right: The blocks of the other path.
        models: The names of the models that wrote answers, by block id, if there are several.
    """
    left_messages = MessageViews(left, models=models).render()
    right_messages = MessageViews(right, models=models).render()
    rows: list[DiffRow] = []
    common = 0
    compared_words = 0
    for tag, left_start, left_end, right_start, right_end in _match_blocks(left, right):
        old = left_messages[left_start:left_end]
        new = right_messages[right_start:right_end]
        if tag == "equal":
            common += len(old)
            rows.append(DiffRow("same", old, new))
            continue
        paired = min(len(old), len(new))
        for one, other in zip(old[:paired], new[:paired], strict=True):
            max_words = min(MAX_WORDS, MAX_PAGE_WORDS - compared_words)
            marked_one, marked_other, words = _mark_changed_words(one, other, max_words)
            compared_words += words
            rows.append(DiffRow("changed", (marked_one,), (marked_other,)))
        rows += [DiffRow("left", left=(message,)) for message in old[paired:]]
        rows += [DiffRow("right", right=(message,)) for message in new[paired:]]
    return tuple(rows), common


def pair_edits(before: Sequence[Block], after: Sequence[Block]) -> dict[str, str]:
    """Return the previous text of each edited message, by the id of the new block."""
    texts: dict[str, str] = {}
    for tag, start, end, new_start, new_end in _match_blocks(before, after):
        if tag != "replace" or end - start != new_end - new_start:
            continue
        for old, new in zip(before[start:end], after[new_start:new_end], strict=True):
            if old.kind == new.kind:
                texts[new.id] = block_text(old)
    return texts


def describe_first_change(before: Sequence[Block], after: Sequence[Block]) -> str:
    """Return a sentence that names the first block that was changed, inserted or removed; empty if none was."""
    start = _common_length(_build_keys(before), _build_keys(after))
    if start == len(before):
        return ""
    change = describe_change(before[start:], after[start:], removed=len(before) - start)
    return f"The first change: {change}."


def _match_blocks(left: Sequence[Block], right: Sequence[Block]) -> list[Opcode]:
    """Return how one path becomes the other; only what differs between their common ends is aligned."""
    left_keys = _build_keys(left)
    right_keys = _build_keys(right)
    start = _common_length(left_keys, right_keys)
    end = _common_length(left_keys[start:][::-1], right_keys[start:][::-1])
    left_end = len(left) - end
    right_end = len(right) - end

    opcodes: list[Opcode] = []
    if start:
        opcodes.append(("equal", 0, start, 0, start))
    opcodes += _match_keys(left_keys[start:left_end], right_keys[start:right_end], start)
    if end:
        opcodes.append(("equal", left_end, len(left), right_end, len(right)))
    return opcodes


def _match_keys(left: list[str], right: list[str], offset: int) -> list[Opcode]:
    """Align the keys of blocks, unless there are too many; ``offset`` is the position of the first ones."""
    if max(len(left), len(right)) > MAX_BLOCKS:
        return [("replace", offset, offset + len(left), offset, offset + len(right))]
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    return [
        (tag, start + offset, end + offset, new_start + offset, new_end + offset)
        for tag, start, end, new_start, new_end in matcher.get_opcodes()
    ]


def _common_length(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(takewhile(bool, map(eq, left, right)))


def _build_keys(blocks: Sequence[Block]) -> list[str]:
    """Return a text for each block that is equal for equal content."""
    return [_build_key(block) for block in blocks]


def _build_key(block: Block) -> str:
    content = {
        name: value
        for name, value in dump_block(block).items()
        if name not in ("id", "metadata", "origin")
    }
    return json.dumps(content, sort_keys=True)


def _mark_changed_words(
    one: MessageView, other: MessageView, max_words: int
) -> tuple[MessageView, MessageView, int]:
    """Mark the words that differ, if both are short texts of the same kind, and return the number of words."""
    if one.kind != other.kind or one.kind not in ("user", "assistant", "system"):
        return one, other, 0
    old = _WORDS.findall(one.text)
    new = _WORDS.findall(other.text)
    count = max(len(old), len(new))
    if count > max_words:
        return one, other, 0
    # A space belongs to the word before it, and words that are frequent in a long text are only matched beside others:
    # a search for each of them would take a minute.
    matcher = SequenceMatcher(None, [word.strip() for word in old], [word.strip() for word in new])
    old_html: list[Markup] = []
    new_html: list[Markup] = []
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        old_html.append(_mark_words(old[start:end], tag, _DELETED))
        new_html.append(_mark_words(new[new_start:new_end], tag, _INSERTED))
    marked_one = replace(one, html=_build_paragraph(old_html))
    marked_other = replace(other, html=_build_paragraph(new_html))
    return marked_one, marked_other, count


def _mark_words(words: Sequence[str], tag: str, element: Markup) -> Markup:
    text = "".join(words)
    if tag == "equal" or not text:
        return escape(text)
    return element.format(text)


def _build_paragraph(pieces: Sequence[Markup]) -> Markup:
    return Markup('<p class="words">{}</p>').format(Markup("").join(pieces))
