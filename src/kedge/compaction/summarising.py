"""The import path of version 0.1 for `kedge.compaction.summarize`."""

from kedge.compaction.summarize import SUMMARY_PROMPT, SummarisingCompactor

ASK = SUMMARY_PROMPT

__all__ = ["ASK", "SUMMARY_PROMPT", "SummarisingCompactor"]
