"""Build plan cards: the blocks that a past request sent, its anchor, and why newer candidates were rejected.

Everything on a card is in the record of the request. The first part compares the blocks of two branches.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq
from typing import Literal

from markupsafe import Markup, escape

from kedge._internal.display import capitalize, pluralize
from kedge.store import RequestRecord, StoredExchange
from kedge.turns import AssistantBlock, Block, SystemBlock, UserBlock, dump_block
from kedge.turns.frozen_json import EMPTY
from kedge.turns.text_format import BLOCK_NAMES, describe, describe_change
from kedge.web.transcript import MessageView, MessageViews, indent_json

MAX_WORDS = 2_000
"""The number of words above which a changed text is not compared word by word."""
MAX_PAGE_WORDS = 20_000
"""The number of words of all texts that are compared word by word, on each side."""
MAX_BLOCKS = 400
"""The number of differing blocks on a side above which they are not aligned."""
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
_CHANGED = (Markup("<del>{}</del>"), Markup("<ins>{}</ins>"))
Opcode = tuple[str, int, int, int, int]
BLOCK_LABELS = {kind: capitalize(name) for kind, name in BLOCK_NAMES.items()}
"""The names of the kinds of blocks."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Blocks of two paths: the same in both, changed, or only in one of them."""

    kind: Literal["same", "changed", "left", "right"]
    left: tuple[MessageView, ...] = ()
    right: tuple[MessageView, ...] = ()


def block_text(block: Block) -> str:
    """Return the text of a message, or an empty text for other blocks."""
    return block.text if isinstance(block, UserBlock | AssistantBlock | SystemBlock) else ""


def build_diff(
    left: Sequence[Block], right: Sequence[Block], models: Mapping[str, str] = EMPTY
) -> tuple[tuple[DiffRow, ...], int]:
    """Return the differences of two paths, and the number of blocks that are the same.

    Args:
        left: The blocks of one path.
        right: The blocks of the other path.
        models: The names of the models that wrote answers, by block id, if there are several.
    """
    messages = [MessageViews(blocks, models=models).render() for blocks in (left, right)]
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
    """Return a sentence that names the first block that was changed, inserted or removed; empty if none was."""
    keys = [[_content_key(block) for block in blocks] for blocks in (before, after)]
    start = _common_length(*keys)
    if start == len(before):
        return ""
    change = describe_change(before[start:], after[start:], removed=len(before) - start)
    return f"The first change: {change}."


def _match_blocks(left: Sequence[Block], right: Sequence[Block]) -> list[Opcode]:
    keys = [[_content_key(block) for block in blocks] for blocks in (left, right)]
    start = _common_length(*keys)
    rest = [each[start:] for each in keys]
    end = _common_length(*(each[::-1] for each in rest))
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
    return sum(takewhile(bool, map(eq, left, right)))


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


FOLD_ENDS = 4
"""The number of unsent blocks shown at either end of a long run of them."""
MAX_BODY_CHARS = 200_000
"""The maximum number of characters shown of a raw body."""


@dataclass(frozen=True, slots=True)
class BlockMark:
    """One block in a plan card, or several folded into one mark."""

    kind: str = ""
    words: str = ""
    sent: bool = False
    folded: int = 0
    omitted: bool = False
    """Whether it was not sent although the server does not have it: reasoning and compactions."""


@dataclass(frozen=True, slots=True)
class PlanCard:
    """The blocks that a request sent, and why newer candidates were rejected."""

    row: RequestRecord
    blocks: tuple[BlockMark, ...] = ()
    exchanges: Sequence[StoredExchange] = ()
    """The bodies of the request and its response, if they are stored."""
    changed: str = ""
    """The first changed block, if a change broke the chain."""


def describe_request_size(row: RequestRecord) -> str:
    """Return one sentence about the messages that were sent and those that the server already had."""
    if row.is_refused:
        return f"The server refused a request with {pluralize(row.sent_blocks, 'message')}."
    if not row.anchor:
        total = row.full_blocks
        return f"Sent {'all ' if total > 1 else ''}{pluralize(total, 'message')}."
    sent = pluralize(row.sent_blocks, "new message") if row.sent_blocks else "no new message"
    if not row.saved_blocks:
        return f"Sent {sent}."
    rest = f"the other {row.saved_blocks:,}" if row.sent_blocks else f"all {row.saved_blocks:,}"
    return f"Sent {sent}; the server already had {rest}."


def mark_blocks(blocks: Sequence[Block], row: RequestRecord) -> tuple[BlockMark, ...]:
    """Return a mark for each block; long runs of blocks that the server had are folded.

    There are none if middleware added or removed blocks: then positions in the stored Turn mean nothing.
    """
    if row.start + row.sent_blocks + len(row.omitted) != len(blocks):
        return ()
    marks = [
        BlockMark(
            block.kind,
            describe(block),
            position >= row.start and position not in row.omitted,
            omitted=position in row.omitted,
        )
        for position, block in enumerate(blocks)
    ]
    return (*_fold_run(marks[: row.start]), *marks[row.start :])


def _fold_run(run: list[BlockMark]) -> list[BlockMark]:
    if len(run) <= 2 * FOLD_ENDS + 1:
        return run
    return [*run[:FOLD_ENDS], BlockMark(folded=len(run) - 2 * FOLD_ENDS), *run[-FOLD_ENDS:]]


def format_body(body: bytes) -> str:
    """Return a raw body as text, with its JSON indented."""
    text = indent_json(body.decode("utf-8", "replace"))
    return text if len(text) <= MAX_BODY_CHARS else f"{text[:MAX_BODY_CHARS]}\n…"
