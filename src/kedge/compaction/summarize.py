"""``SummarisingCompactor``: a model sums up the old part, and the newest part stays word for word.

The model is asked at the end of the old part, as a branch of the conversation: where the server
remembers it, only the question is sent. The summary takes the place of what it sums up, as a user block
that is marked in its text, for the model, and in its metadata, for everyone else. An earlier summary is
part of the old part, so it is folded into the new one. If the model fails, nothing is cut.
"""

from collections.abc import Sequence
from typing import Any

from kedge.compaction.base import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_if_triggered,
)
from kedge.compaction.boundaries import check_positive_int, cut_points, find_first_fit
from kedge.engines import Engine
from kedge.errors import KedgeError
from kedge.events import Usage
from kedge.turns import Block, UserBlock, user

SUMMARY_HEADING = "[Summary of the conversation so far]"
SUMMARY_PROMPT = (
    "Summarise our conversation so far, so that it can be continued from your summary alone. Keep "
    "names, numbers, decisions, what was asked for and what is still open; keep what an earlier summary "
    "says. Write only the summary."
)
SUMMARY_KEY = "summary"
"""Metadata key of a summary: how many blocks it stands for."""


class SummarisingCompactor:
    """Above ``max_tokens``, has the old part summed up and keeps about ``keep_tokens`` of the newest.

    ``keep_tokens`` is half the maximum by default; the newest exchange is kept in any case. ``engine`` or
    ``model`` name another, cheaper model than that of the conversation; ``ask`` are the words that
    ask for the summary. Serves as trigger and as strategy too.
    """

    name = "SummarisingCompactor"

    def __init__(
        self,
        max_tokens: int,
        keep_tokens: int | None = None,
        *,
        engine: Engine | None = None,
        model: str = "",
        ask: str = SUMMARY_PROMPT,
    ) -> None:
        self.max_tokens = check_positive_int("max_tokens", max_tokens)
        keep = max(1, max_tokens // 2) if keep_tokens is None else keep_tokens
        self.keep_tokens = check_positive_int("keep_tokens", keep, maximum=max_tokens)
        self.engine = engine
        self.model = model
        self.ask = ask

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Sum up the old part, if the conversation is too large."""
        return await compact_if_triggered(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether the conversation has more than ``max_tokens``."""
        return request.size() > self.max_tokens

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """A summary of the old part, and the newest part."""
        start = await self._find_start(request)
        old, new = request.blocks[:start], request.blocks[start:]
        if all(map(is_summary, old)):
            return Replacement(request.blocks, ("there is nothing old enough to sum up",))
        try:
            text, usage = await self._request_summary(request, old)
        except KedgeError as error:
            note = f"the summary call failed ({type(error).__name__}); nothing was cut"
            return Replacement(request.blocks, (note,))
        summary = build_summary_block(text, old)
        if not text or request.count([summary]) >= request.count(old):
            note = "the summary is empty or no shorter than what it sums up; nothing was cut"
            return Replacement(request.blocks, (note,), usage)
        return Replacement((summary, *new), usage=usage)

    async def _find_start(self, request: CompactionRequest) -> int:
        """Where the newest part begins."""
        left = request.suffix_tokens()

        async def fits(start: int) -> bool:
            return left[start] <= self.keep_tokens

        return (await find_first_fit(cut_points(request.blocks), fits))[0]

    async def _request_summary(
        self, request: CompactionRequest, old: Sequence[Block]
    ) -> tuple[str, Usage]:
        engine = self.engine or request.engine
        if engine is None:
            raise KedgeError("there is no engine to ask for a summary")
        turn = request.build_turn(old).append(user(self.ask, origin=self.name))
        options: dict[str, Any] = {"model": self.model} if self.model else {}
        if engine.plan(turn).mode == "conversation":
            options["mode"] = "chained"  # the question must not get into the conversation object
        async with engine.stream(turn, streaming=False, **options) as stream:
            await stream.finish()
        return stream.text.strip(), stream.usage


def build_summary_block(text: str, old: Sequence[Block]) -> UserBlock:
    """The block that stands for the old ones."""
    covered = sum(block.metadata.get(SUMMARY_KEY, 1) if is_summary(block) else 1 for block in old)
    return user(
        f"{SUMMARY_HEADING}\n{text}",
        origin=SummarisingCompactor.name,
        metadata={SUMMARY_KEY: covered},
    )


def is_summary(block: Block) -> bool:
    """Whether this block is a summary of earlier ones."""
    covered = block.metadata.get(SUMMARY_KEY)
    return isinstance(block, UserBlock) and isinstance(covered, int)
