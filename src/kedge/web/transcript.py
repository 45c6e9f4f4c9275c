"""Convert blocks to messages, and to exchanges of a question and its answer.

The chat shows the Turn as it is at the chosen node. Each block belongs to the node of the path that added
it, unless a later node removed it; so the blocks are assigned to nodes, and the nodes to exchanges, each of
which ends with a response.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, assert_never, cast
from urllib.parse import quote

from markupsafe import Markup, escape

from kedge import turns
from kedge._internal.json_text import encode_indented
from kedge._internal.urls import is_safe_link
from kedge.store import Hit, Node, RequestRecord
from kedge.store.records import ANSWERED_STATUSES
from kedge.store.search_query import WORD, Query, fold_text
from kedge.store.tree import BlockRange, iter_block_ranges
from kedge.tools.run import OUTCOME_KEY
from kedge.turns.frozen_json import thaw
from kedge.web.schemas import IMAGE_TYPES

HINT_LENGTH = 120
"""The maximum number of characters in the line of a folded block."""
_OUTCOME_TAGS = {"ok": (), "refused": ("refused",), "cancelled": ("cancelled",)}
IMAGE_PREFIXES = tuple(f"data:{name};" for name in IMAGE_TYPES)


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image or file of a message: displayed or offered for download if its content is stored, else linked.

    ``src`` and ``stored`` are addresses below that of the conversation.
    """

    alt: str
    src: str = ""
    link: str = ""
    stored: str = ""


@dataclass(frozen=True, slots=True)
class MessageView:
    """One block in the chat."""

    id: str
    kind: str
    title: str
    source: str = ""
    """The Markdown of the shown text."""
    text: str = ""
    hint: str = ""
    images: tuple[Attachment, ...] = ()
    tags: tuple[str, ...] = ()
    previous: str | None = None
    """The text before the block was edited; None if it was not."""
    model: str = ""
    """The model that wrote it; empty if one model wrote all answers of the conversation."""
    html: Markup | None = None
    """Shown instead of ``source``, if there is any: the differences to another message."""


class MessageViews:
    """Converts the blocks of a path to messages; the result of a tool has the name of the tool.

    Args:
        blocks: The blocks.
        previous: The texts of edited blocks before their edit, by block id.
        models: The names of the models that wrote answers, by block id, if there are several.
    """

    def __init__(
        self,
        blocks: Sequence[turns.Block],
        previous: Mapping[str, str] | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.blocks = blocks
        self._previous = previous or {}
        self._models = models or {}
        calls = (block for block in blocks if isinstance(block, turns.ToolCallBlock))
        self._names = {block.call_id: block.name for block in calls}

    def render(
        self, start: int = 0, stop: int | None = None, tags: tuple[str, ...] = ()
    ) -> tuple[MessageView, ...]:
        """Return the messages of a range of blocks, with further tags."""
        views = [_render_block(block, self._names) for block in self.blocks[start:stop]]
        return tuple(
            replace(
                view,
                previous=self._previous.get(view.id),
                model=self._models.get(view.id, ""),
                tags=view.tags + tags,
            )
            for view in views
        )

    def render_ranges(self, ranges: Sequence[BlockRange]) -> tuple[MessageView, ...]:
        """Return the messages of the blocks that some nodes added."""
        messages: list[MessageView] = []
        for node, start, stop in ranges:
            tags = ("merged",) if node.kind == "merged" else ()
            messages += self.render(start, stop, tags)
        return tuple(messages)


@dataclass(frozen=True)
class ExchangeView:
    """A question and its answer, whose messages are rendered when they are needed.

    ``node`` is the node of the answer, ``question`` the node of the question (0 if history was rewritten),
    ``before`` the node before the question. ``row`` is None while there is no response.
    """

    messages: MessageViews
    node: int
    row: RequestRecord | None
    asked_ranges: tuple[BlockRange, ...]
    answered_range: tuple[int, int]
    created_at: float
    before: int = 0
    question: int = 0
    status: str = "pending"
    has_progress: bool = False
    """Whether a part of the answer, such as the results of tools, is stored."""

    @cached_property
    def asked(self) -> tuple[MessageView, ...]:
        """The messages before the answer."""
        return self.messages.render_ranges(self.asked_ranges)

    @cached_property
    def answered(self) -> tuple[MessageView, ...]:
        """The messages of the answer."""
        return self.messages.render(*self.answered_range)

    @property
    def is_trouble(self) -> bool:
        """Whether the question has no complete answer."""
        return self.status not in ANSWERED_STATUSES


def split_exchanges(
    path: Sequence[Node], messages: MessageViews, responses: Mapping[int, RequestRecord]
) -> tuple[list[ExchangeView], list[BlockRange]]:
    """Return the exchanges on a path, and the blocks after the last of them.

    Where history was rewritten, a node contains blocks of earlier responses: they are shown with their
    response, as they were received. A response whose blocks were all removed is not shown.
    """
    builder = _ExchangeBuilder(messages, responses)
    before = 0
    question = 0
    for node, start, stop in iter_block_ranges(path):
        if node.kind == "asked":
            before = node.parent
            question = node.id
        row = responses.get(node.id)
        if row is None:
            builder.add_blocks(node, start, stop)
        elif stop > start or row.status not in ANSWERED_STATUSES:
            builder.add_exchange(node, row, (start, stop), before, question)
            before = 0
    return builder.exchanges, builder.ranges


class _ExchangeBuilder:
    """Collects the exchanges of a path, and the blocks after the last of them.

    Args:
        messages: The messages of the path.
        responses: The responses of the tree, by node.
    """

    def __init__(self, messages: MessageViews, responses: Mapping[int, RequestRecord]) -> None:
        self.exchanges: list[ExchangeView] = []
        self.ranges: list[BlockRange] = []
        self._messages = messages
        self._by_response_id = {
            row.provider_response_id: row for row in responses.values() if row.provider_response_id
        }

    def add_exchange(
        self,
        node: Node,
        row: RequestRecord,
        answered: tuple[int, int],
        before: int = 0,
        question: int = 0,
    ) -> None:
        """Add an exchange, which asks with the blocks that were collected."""
        self.exchanges.append(
            ExchangeView(
                messages=self._messages,
                node=row.node,
                row=row,
                asked_ranges=tuple(self.ranges),
                answered_range=answered,
                created_at=row.created_at or node.created_at,
                before=before,
                question=question,
                status="resent" if row.is_resent else row.status,
                has_progress=any(asked.kind == "results" for asked, _, _ in self.ranges),
            )
        )
        self.ranges = []

    def add_blocks(self, node: Node, start: int, stop: int) -> None:
        """Add blocks of a node without a response; if history was rewritten, they include earlier answers."""
        first = len(self.exchanges)
        for index in range(start, stop):
            row = self._by_response_id.get(self._messages.blocks[index].response_id)
            if row is None:
                self.ranges.append((node, index, index + 1))
            elif len(self.exchanges) > first and self._ends_before(index, row):
                self._extend_answer(index + 1)
            else:
                self.add_exchange(node, row, (index, index + 1))

    def _ends_before(self, index: int, row: RequestRecord) -> bool:
        """Return whether the last exchange is the beginning of an answer that continues with a block."""
        last = self.exchanges[-1]
        return last.row is row and last.answered_range[1] == index

    def _extend_answer(self, stop: int) -> None:
        last = self.exchanges[-1]
        start, _ = last.answered_range
        self.exchanges[-1] = replace(last, answered_range=(start, stop))


def find_pending(
    path: Sequence[Node], ranges: Sequence[BlockRange], messages: MessageViews
) -> ExchangeView | None:
    """Return the exchange of a path that ends with a question, or with the results of tools, without an answer."""
    question = next((node for node in reversed(path) if node.kind == "asked"), None)
    end = path[-1]
    if question is None or end.kind not in ("asked", "results"):
        return None
    return ExchangeView(
        messages=messages,
        node=end.id,
        row=None,
        asked_ranges=tuple(ranges),
        answered_range=(0, 0),
        created_at=end.created_at,
        before=question.parent,
        question=question.id,
        has_progress=end.kind == "results",
    )


def _render_block(block: turns.Block, names: Mapping[str, str]) -> MessageView:
    match block:
        case turns.UserBlock():
            return _render_text(block, "You", block.text, block.parts)
        case turns.AssistantBlock():
            view = _render_text(block, "Assistant", block.text, block.parts)
            if block.refusal:
                view = replace(view, tags=(*view.tags, "refused"))
            return view
        case turns.SystemBlock():
            title = "Developer" if block.role == "developer" else "System"
            return _render_text(block, title, block.text, ())
        case turns.ReasoningBlock():
            return _render_reasoning(block)
        case turns.ToolCallBlock():
            text = indent_json(block.arguments)
            return MessageView(
                block.id, "tool_call", block.name, text=text, hint=summarize_text(block.arguments)
            )
        case turns.ToolResultBlock():
            name = names.get(block.call_id, block.call_id)
            outcome = str(block.metadata.get(OUTCOME_KEY, "ok"))
            return MessageView(
                block.id,
                "tool_result",
                name,
                text=indent_json(block.text),
                hint=summarize_text(block.text),
                images=tuple(_render_parts(block, block.parts)),
                tags=_OUTCOME_TAGS.get(outcome, ("failed",)),
            )
        case turns.OpaqueBlock():
            text = encode_indented(thaw(block.item))
            return MessageView(block.id, "opaque", block.type, text=text, hint="stored unchanged")
        case turns.UnknownBlock():
            text = encode_indented(turns.dump_block(block))
            return MessageView(block.id, "unknown", "A block of a newer Kedge", text=text)


def _render_text(
    block: turns.Block, title: str, text: str, parts: Sequence[turns.Part]
) -> MessageView:
    refusals = [part.text for part in parts if isinstance(part, turns.RefusalPart)]
    complete = "\n\n".join([text, *refusals])
    origin: tuple[str, ...] = ()
    if block.origin not in ("user", "engine"):
        origin = (f"by {block.origin}",)
    return MessageView(
        block.id,
        block.kind,
        title,
        complete,
        text,
        images=tuple(_render_parts(block, parts)),
        tags=origin,
    )


def _render_reasoning(block: turns.ReasoningBlock) -> MessageView:
    text = "\n\n".join((*block.summary, *block.texts))
    hint = summarize_text(text)
    if not text:
        text = "*The provider does not show the reasoning of the model.*"
        hint = "encrypted" if block.encrypted_content else "not shown"
    return MessageView(block.id, "reasoning", "Reasoning", source=text, text=text, hint=hint)


def _render_parts(block: turns.Block, parts: Sequence[turns.Part]) -> Iterator[Attachment]:
    for index, part in enumerate(parts):
        stored = f"attachments/{quote(block.id, safe='')}/{index}"
        match part:
            case turns.ImagePart():
                yield _render_image("Image", part.url or part.file_id, stored)
            case turns.FilePart():
                name = part.filename or part.file_id or "without a name"
                yield Attachment(
                    f"File: {name}",
                    link=part.url if is_safe_link(part.url) else "",
                    stored=stored if part.data else "",
                )
            case turns.OpaquePart():
                yield Attachment(f"A part of type {part.content.get('type', 'unknown')}")
            case turns.TextPart() | turns.RefusalPart():
                continue
            case _:
                assert_never(part)


def _render_image(alt: str, url: str, stored: str) -> Attachment:
    if url.startswith(IMAGE_PREFIXES):
        return Attachment(alt, src=stored)
    if is_safe_link(url):
        return Attachment(f"{alt} at {url}", link=url)
    return Attachment(f"{alt}: {url[:80]}")


def indent_json(text: str) -> str:
    """Indent JSON; return any other text unchanged."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict | list):
        return text
    return encode_indented(cast("Any", value))


def summarize_text(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text[: 4 * HINT_LENGTH].split())
    if len(line) <= HINT_LENGTH:
        return line
    return f"{line[:HINT_LENGTH]}…"


_MARK = Markup("<mark>{}</mark>")


def find_matches(text: str, query: str) -> list[tuple[int, int]]:
    """Return the start and the end of each word of a text that matches a search."""
    alternatives = Query.parse(query).alternatives
    atoms = [atom for alternative in alternatives for atom in alternative.required]
    terms = [(word, atom.is_prefix) for atom in atoms for word in atom.pattern.split()]
    matches: list[tuple[int, int]] = []
    for match in WORD.finditer(text):
        word = fold_text(match.group())
        if any(_matches_term(word, term, is_prefix=is_prefix) for term, is_prefix in terms):
            matches.append(match.span())
    return matches


def _matches_term(word: str, term: str, *, is_prefix: bool) -> bool:
    """Return whether a word of a text matches a word of a search."""
    if word == term or (is_prefix and word.startswith(term)):
        return True
    # Texts in scripts without spaces, such as Chinese, are one word.
    return not term.isascii() and term in word


def render_excerpt(hit: Hit, query: str) -> Markup:
    """Return the text around a match of a search, with the words that match marked."""
    pieces: list[Markup] = []
    end = 0
    for start, stop in find_matches(hit.excerpt, query):
        pieces += [escape(hit.excerpt[end:start]), _MARK.format(hit.excerpt[start:stop])]
        end = stop
    return Markup("").join([*pieces, escape(hit.excerpt[end:])])
