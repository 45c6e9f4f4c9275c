"""Debate: two models on two servers argue, a third one judges. Only text is exchanged between them.

By default three local servers answer with scripts of the practice model. Set KEDGE_MODEL_TEA,
KEDGE_MODEL_COFFEE and KEDGE_MODEL_JUDGE to use real models.
"""

import json
import os
from contextlib import ExitStack
from typing import Any

from kedge import run_sync
from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.store import open_store
from kedge.testing import serve
from kedge.workflows import DebateResult, ModelJudge, Side, debate, load_workflow

QUESTION = "Tea or coffee, for a night watch at sea?"
PARTS: dict[str, list[dict[str, Any]]] = {
    "tea": [
        {"when": "sailors drink", "say": "They do, and at four the watch sleeps."},
        {"when": "debate", "say": "Tea wakes slowly and lasts until the morning."},
    ],
    "coffee": [
        {"when": "lasts", "say": "Coffee wakes faster, and rocks do not wait."},
        {"when": "debate", "say": "Coffee is what sailors drink."},
    ],
    "judge": [
        {
            "when": "rocks do not wait",
            "say": json.dumps(
                {"decided": True, "winner": "tea", "reason": "A watch lasts the whole night."}
            ),
        },
        {"say": json.dumps({"decided": False, "winner": "nobody", "reason": "Too early."})},
    ],
}


def models(stack: ExitStack) -> dict[str, str]:
    """Return a model string for each role."""
    model_strings: dict[str, str] = {}
    for part, answers in PARTS.items():
        model_strings[part] = os.environ.get(f"KEDGE_MODEL_{part.upper()}", "")
        if not model_strings[part]:
            script = Script.from_data({"answers": answers})
            server = stack.enter_context(serve(model=PracticeModel(script)))
            model_strings[part] = f"responses:{server.base_url}#practice"
    return model_strings


async def argue(url: str = "sqlite://:memory:") -> DebateResult:
    """Run the debate and print its chains from the store."""
    with ExitStack() as stack:
        model_strings = models(stack)
        async with open_store(url) as store:
            result = await debate(
                QUESTION,
                [Side("tea", model_strings["tea"]), Side("coffee", model_strings["coffee"])],
                judge=ModelJudge(
                    model_strings["judge"], "Whose reasons are better for a night at sea?"
                ),
                store=store,
                rounds=3,
            )
            workflow = await load_workflow(store, result.workflow)
            for chain in workflow.chains[:2]:
                print(f"{chain.role}:")
                for each in chain.exchanges:
                    print(f"  {each.number}. {each.answer}")
            return result


def main() -> None:
    """Run the debate and print the result."""
    result = run_sync(argue())
    print(f"{result.winner or 'nobody'} won after {result.rounds} rounds: {result.ruling.reason}")


if __name__ == "__main__":
    main()
