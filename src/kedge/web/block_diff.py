"""Compute the differences of two paths: blocks that are the same, changed, or only in one of them.

Blocks are compared by content, so an edited block is never shown as shared, and one that was rewritten
without a change is. Changed texts are compared word by word.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from markupsafe import Markup, escape

from kedge.turns import AssistantBlock, Block, SystemBlock, UserBlock, dump_block
from kedge.turns.text_format import describe
from kedge.web.transcript import render_messages, tool_names
from kedge.web.views import BLOCK_LABELS, DiffRow, MessageView

MAX_WORDS = 2_000
"""The number of words above which a changed text is not compared word by word."""
MAX_PAGE_WORDS = 20_000
"""The number of words of all texts that are compared word by word, on each side."""
MAX_BLOCKS = 400
"""The number of differing blocks on a side above which they are not aligned."""
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
_CHANGED = (Markup("<del>{}</del>"), Markup("<ins>{}</ins>"))
Opcode = tuple[str, int, int, int, int]


def block_text(block: Block) -> str:
    """Return the text of a message, or an empty text for other blocks."""
    return block.text if isinstance(block, UserBlock | AssistantBlock | SystemBlock) else ""


def build_diff(left: Sequence[Block], right: Sequence[Block]) -> tuple[tuple[DiffRow, ...], int]:
    """Return the differences of two paths, and the number of blocks that are the same."""
    messages = [render_messages(blocks, tool_names(blocks)) for blocks in (left, right)]
    rows: list[DiffRow] = []
    common, words = 0, 0
    for tag, i1, i2, j1, j2 in _match_blocks(left, right):
        if tag == "equal":
            common += i2 - i1
            rows.append(DiffRow("same", messages[0][i1:i2], messages[1][j1:j2]))
            continue
        paired = min(i2 - i1, j2 - j1)
        for one, other in zip(
            messages[0][i1 : i1 + paired], messages[1][j1 : j1 + paired], strict=True
        ):
            pair, compared = _diff_messages(one, other, MAX_PAGE_WORDS - words)
            words += compared
            rows.append(DiffRow("changed", *((each,) for each in pair)))
        rows += [DiffRow("left", left=(each,)) for each in messages[0][i1 + paired : i2]]
        rows += [DiffRow("right", right=(each,)) for each in messages[1][j1 + paired : j2]]
    return tuple(rows), common


def pair_edits(before: Sequence[Block], after: Sequence[Block]) -> dict[str, str]:
    """Return the previous text of each edited message, by the id of the new block."""
    return {
        new.id: block_text(old)
        for tag, i1, i2, j1, j2 in _match_blocks(before, after)
        if tag == "replace" and i2 - i1 == j2 - j1
        for old, new in zip(before[i1:i2], after[j1:j2], strict=True)
        if old.kind == new.kind
    }


def describe_first_change(before: Sequence[Block], after: Sequence[Block]) -> str:
    """Return a sentence that names the first block that was changed, inserted or removed."""
    for tag, i1, i2, j1, j2 in _match_blocks(before, after):
        if tag == "equal" or i1 == i2 == len(before):
            continue
        old = before[i1] if i2 > i1 else None
        new = after[j1] if j2 > j1 else None
        if old is None:
            return f"The first change is a new {_name_block(new)}." if new else ""
        replacement = f", which is now {_quote_block(new)}" if new and new.kind == old.kind else ""
        removal = "" if new else ", which was removed"
        return f"The first changed message is the {_name_block(old)}{replacement or removal}."
    return ""


def _name_block(block: Block) -> str:
    return f"{BLOCK_LABELS.get(block.kind, block.kind).lower()} {_quote_block(block)}"


def _quote_block(block: Block) -> str:
    return f"“{describe(block, 60)}”"


def _match_blocks(left: Sequence[Block], right: Sequence[Block]) -> list[Opcode]:
    keys = [[_content_key(block) for block in blocks] for blocks in (left, right)]
    start = _common_length(keys[0], keys[1])
    rest = [each[start:] for each in keys]
    end = _common_length(rest[0][::-1], rest[1][::-1])
    rest = [each[: len(each) - end] for each in rest]
    sizes = [len(each) for each in rest]
    opcodes: list[Opcode] = [("equal", 0, start, 0, start)] if start else []
    if max(sizes) > MAX_BLOCKS:
        opcodes.append(("replace", start, start + sizes[0], start, start + sizes[1]))
    else:
        matcher = SequenceMatcher(None, *rest, autojunk=False)
        opcodes += [
            (tag, i1 + start, i2 + start, j1 + start, j2 + start)
            for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        ]
    if end:
        opcodes.append(("equal", len(left) - end, len(left), len(right) - end, len(right)))
    return opcodes


def _common_length(left: Sequence[str], right: Sequence[str]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


def _content_key(block: Block) -> str:
    form = dump_block(block)
    return json.dumps(
        {name: form[name] for name in form if name not in ("id", "metadata", "origin")},
        sort_keys=True,
    )


def _diff_messages(
    one: MessageView, other: MessageView, max_words: int
) -> tuple[tuple[MessageView, MessageView], int]:
    """Mark the words that differ, if both are short texts of the same kind, and return the number of words."""
    if one.kind != other.kind or one.kind not in ("user", "assistant", "system"):
        return (one, other), 0
    words = [_WORDS.findall(each.text) for each in (one, other)]
    count = max(map(len, words))
    if count > min(MAX_WORDS, max_words):
        return (one, other), 0
    sides: list[list[Markup]] = [[], []]
    # A space belongs to the word before it, and words that are frequent in a long text are only matched beside others:
    # a search for each of them would take a minute.
    old, new = ([word.strip() for word in each] for each in words)
    matcher = SequenceMatcher(None, old, new)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        texts = ("".join(words[0][i1:i2]), "".join(words[1][j1:j2]))
        for side, element, text in zip(sides, _CHANGED, texts, strict=True):
            if text:
                side.append(escape(text) if tag == "equal" else element.format(text))
    html = [Markup('<p class="words">{}</p>').format(Markup("").join(side)) for side in sides]
    return (replace(one, html=html[0]), replace(other, html=html[1])), count
