"""Summaries: a model summarizes the old part of a long conversation in one block.

A real model gets the prompt ``kedge.compaction.summarize.SUMMARY_PROMPT``. The built-in model answers the
question below with a list of earlier messages.
"""

import os

from kedge import Chat, run_sync
from kedge.compaction import SummarizingCompactor, is_summary
from kedge.compaction.summarize import SUMMARY_PROMPT

PRACTICE = "What have I said so far?"
SHIPS = ("Argo", "Beagle", "Calypso", "Discovery", "Endeavour", "Fram", "Golden Hind", "Hermione")


async def main() -> None:
    """Mention many ships, then ask about the first."""
    model = os.environ.get("KEDGE_MODEL", "practice")
    prompt = PRACTICE if model == "practice" else SUMMARY_PROMPT
    compactor = SummarizingCompactor(
        250, 80, prompt=prompt
    )  # engine= or model= for a cheaper model
    state: bytes | None = None
    async with Chat(model, compactor=compactor) as chat:
        for number, ship in enumerate(SHIPS):
            answer = await chat.chat_with_state(state, f"Ship number {number} is the {ship}.")
            state = answer.state
            for compaction in answer.compactions:
                print(compaction)
        answer = await chat.chat_with_state(state, "Do you remember Argo?")
        print(answer.text)
        print([block.kind for block in answer.turn], is_summary(answer.turn.blocks[0]))


if __name__ == "__main__":
    run_sync(main())
