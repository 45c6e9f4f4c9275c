"""``SummarizingCompactor``: a model summarizes the old part, and the newest part is unchanged.

The request for the summary continues the old part as a branch of the conversation: if the server has stored
it, only the prompt is sent. The summary replaces the old part, as a user block that is marked in its text,
for the model, and in its metadata, for programs. An earlier summary is part of the old part, so it is
merged into the new one. If the model fails, nothing is removed.

The length of a summary is bounded. A model that writes long summaries would otherwise leave a conversation
near its maximum, which is then compacted, with a request, after every answer.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_positive_int
from kedge.compaction.base import (
    CompactionRequest,
    Replacement,
    SelfTriggeredCompactor,
    check_engine,
    cut_points,
    find_first_fit,
)
from kedge.engines import Engine
from kedge.errors import KedgeError
from kedge.events import Usage
from kedge.turns import Block, TextPart, UserBlock, user

SUMMARY_HEADING = "[Summary of the conversation so far]"
SUMMARY_PROMPT = (
    "Summarize our conversation so far, so that it can be continued from your summary alone. Keep "
    "names, numbers, decisions, what was asked for and what is still open; keep what an earlier summary "
    "says. Write only the summary."
)
SUMMARY_ORIGIN = "SummarizingCompactor"
SUMMARY_KEY = "kedge.summary"
"""Metadata key of a summary: the number of blocks it replaces."""
MIN_SUMMARY_TOKENS = 32
"""The lowest default for the maximum length of a summary: its heading and a sentence."""
CUT_MARK = " […]"


class SummarizingCompactor(SelfTriggeredCompactor):
    """Replaces the old part of a conversation by a summary. Also a trigger and a strategy.

    Args:
        max_tokens: The number of tokens of a conversation above which it is compacted.
        keep_tokens: The approximate number of tokens of the newest exchanges that remain; by default half of
            ``max_tokens``. The newest exchange always remains.
        engine: The engine to use; by default the engine of the conversation.
        model: Another, cheaper model than the conversation has.
        prompt: The prompt that requests the summary.
        max_summary_tokens: The maximum length of a summary, to which a longer one is cut; by default
            half of what ``keep_tokens`` leaves of ``max_tokens``.

    Raises:
        InvalidSetting: A number is below 1 or above its maximum, or ``engine`` is not an engine.
    """

    def __init__(
        self,
        max_tokens: int,
        keep_tokens: int | None = None,
        *,
        engine: Engine | None = None,
        model: str = "",
        prompt: str = SUMMARY_PROMPT,
        max_summary_tokens: int | None = None,
    ) -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        if keep_tokens is None:
            keep_tokens = max(1, max_tokens // 2)
        self.keep_tokens = check_positive_int("keep_tokens", keep_tokens, maximum=max_tokens)
        if max_summary_tokens is None:
            max_summary_tokens = max(MIN_SUMMARY_TOKENS, (max_tokens - keep_tokens) // 2)
        else:
            check_positive_int("max_summary_tokens", max_summary_tokens, maximum=max_tokens)
        self.max_summary_tokens = max_summary_tokens
        self.engine = check_engine(engine)
        self.model = model
        self.prompt = prompt

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether the conversation has more than ``max_tokens``."""
        return request.size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return a summary of the old part, and the newest part."""
        start = await self._find_start(request)
        old = request.blocks[:start]
        new = request.blocks[start:]
        if all(map(is_summary, old)):  # also if there is no old part
            return Replacement(request.blocks, ("there is nothing old enough to summarize",))
        try:
            text, usage = await self._request_summary(request, old)
        except KedgeError as error:
            note = f"the summary call failed ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        summary, notes = self._bound_summary(request, build_summary_block(text, old))
        if not text or request.count([summary]) >= request.count(old):
            note = "the summary is empty or no shorter than what it summarizes; nothing was cut"
            return Replacement(request.blocks, (note,), usage)
        return Replacement((summary, *new), notes, usage)

    def _bound_summary(
        self, request: CompactionRequest, summary: UserBlock
    ) -> tuple[UserBlock, tuple[str, ...]]:
        """Return the summary cut to its maximum length, and a note if it was cut."""
        tokens = request.count([summary])
        if tokens <= self.max_summary_tokens:
            return summary, ()
        note = f"the summary had {tokens} tokens and was cut to {self.max_summary_tokens}"
        text = summary.text
        # Tokens differ in length, so the length is estimated again until the summary fits.
        # Each step removes at least one character.
        while text and tokens > self.max_summary_tokens:
            estimated_length = len(text) * self.max_summary_tokens // tokens
            text = text[: min(estimated_length, len(text) - 1)]
            summary = replace(summary, parts=(TextPart(f"{text}{CUT_MARK}"),))
            tokens = request.count([summary])
        return summary, (note,)

    async def _find_start(self, request: CompactionRequest) -> int:
        """Return the index at which the newest part begins."""
        tokens = request.suffix_tokens()
        points = cut_points(request.blocks)
        # If even the newest exchange alone is too long, it is the newest part.
        start, _ = await find_first_fit(points, lambda index: tokens[index] <= self.keep_tokens)
        return start

    async def _request_summary(
        self, request: CompactionRequest, old: Sequence[Block]
    ) -> tuple[str, Usage]:
        engine = self.engine or request.engine
        if engine is None:
            raise KedgeError(
                "there is no engine to request a summary from; give the compactor an engine"
            )
        turn = request.build_turn(old).append(user(self.prompt, origin=SUMMARY_ORIGIN))
        options: dict[str, Any] = {}
        if self.model:
            options["model"] = self.model
        if engine.plan(turn).mode == "conversation":
            # The prompt must not become part of the conversation object.
            options["mode"] = "chained"
        # The answer is waited for as a whole: nobody reads a summary while it is written.
        stream = engine.stream(turn, streaming=False, **options)
        await stream.finish()
        return stream.text.strip(), stream.usage


def build_summary_block(text: str, old: Sequence[Block]) -> UserBlock:
    """Return a summary block, with the number of original blocks that it covers."""
    covered = 0
    for block in old:
        if is_summary(block):
            covered += block.metadata[SUMMARY_KEY]
        else:
            covered += 1
    summary = f"{SUMMARY_HEADING}\n{text}"
    return user(summary, origin=SUMMARY_ORIGIN, metadata={SUMMARY_KEY: covered})


@checked
def is_summary(block: Block) -> bool:
    """Return whether a block is a summary of earlier ones."""
    covered = block.metadata.get(SUMMARY_KEY)
    return isinstance(block, UserBlock) and isinstance(covered, int)
