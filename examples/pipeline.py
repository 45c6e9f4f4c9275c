"""Steps: a pipeline of prompts on one chain, with typed results between them."""

import os
from typing import Literal

from pydantic import BaseModel

from kedge import run_sync
from kedge.store import open_store
from kedge.workflows import Step, StepsResult, steps


class Trip(BaseModel):
    """Data to extract from a sentence."""

    city: str
    days: int
    mode: Literal["train", "ship"]


class Sum(BaseModel):
    """A computed number."""

    result: int


PIPELINE = (
    Step("trip", "{wish}", result=Trip),
    Step("hours", "What is {trip.days} * 24?", result=Sum),
    Step("note", "Say {hours.result} hours in {trip.city}, by {trip.mode}"),
    Step("check", "What did I say first?"),
)


async def plan(wish: str, url: str = "sqlite://:memory:") -> StepsResult:
    """Run the pipeline for a travel wish."""
    model = os.environ.get("KEDGE_MODEL", "practice")
    async with open_store(url) as store:
        return await steps(PIPELINE, inputs={"wish": wish}, store=store, engine=model)


def main() -> None:
    """Run the pipeline and print each step."""
    result = run_sync(plan("I travel to Lisbon for 3 days by ship."))
    for step in result.steps:
        print(f"{step.name}: {step.value!r}")


if __name__ == "__main__":
    main()
