"""Refine: a model searches for the rule of a grid puzzle (similar to ARC) with the help of critiques.

The model answers with a list of steps. The judge, a plain function, applies them to the training pairs and
reports the first difference. The model never sees the answer of the test grid.

    python examples/refine_puzzle.py

By default the practice model answers, from a script that reacts to the critique. Set KEDGE_MODEL to use
another model.
"""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kedge import run_sync
from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.store import open_store
from kedge.testing import serve
from kedge.workflows import RefineResult, Verdict, refine

HERE = Path(__file__).parent
PUZZLE = json.loads((HERE / "puzzle.json").read_text())

Grid = list[list[int]]
STEPS: dict[str, Callable[[Grid], Grid]] = {
    "mirror": lambda grid: [row[::-1] for row in grid],
    "flip": lambda grid: grid[::-1],
    "turn": lambda grid: [list(row) for row in zip(*grid[::-1], strict=True)],
}
TASK = f"""\
This is a puzzle. One rule makes each output from its input; 0 is the background.
{json.dumps(PUZZLE["train"])}
Find the rule, as steps: {", ".join(STEPS)}, or "paint A B" to give the cells of color A the color B.
Answer with a JSON object: {{"steps": ["…", "…"]}}"""


def follow(steps: list[str], grid: Grid) -> Grid:
    """Apply the steps of a rule to a grid."""
    for step in steps:
        match step.split():
            case ["paint", old, new]:
                grid = [[int(new) if cell == int(old) else cell for cell in row] for row in grid]
            case [name] if name in STEPS:
                grid = STEPS[name](grid)
            case _:
                raise ValueError(f"there is no step {step!r}")
    return grid


def check(answer: str) -> Verdict:
    """Apply a rule to the training pairs and describe the first difference."""
    try:
        steps = json.loads(answer)["steps"]
        actual = [follow(steps, pair["input"]) for pair in PUZZLE["train"]]
    except (ValueError, KeyError, TypeError) as error:
        return Verdict(passed=False, critique=f"That is no rule: {error}", score=0.0)
    expected = [pair["output"] for pair in PUZZLE["train"]]
    right = sum(map(_right_cells, actual, expected))
    score = right / sum(len(row) for grid in expected for row in grid)
    problems = [_problem(*grids) for grids in zip(actual, expected, strict=True)]
    first = next((f"Pair {i}: {problem}" for i, problem in enumerate(problems, 1) if problem), "")
    return Verdict(passed=not first, critique=first, score=round(score, 2))


def _right_cells(actual: Grid, expected: Grid) -> int:
    if _shape(actual) != _shape(expected):
        return 0
    pairs = [
        (a, b)
        for left, right in zip(actual, expected, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return sum(a == b for a, b in pairs)


def _shape(grid: Grid) -> tuple[int, int]:
    return len(grid), len(grid[0])


def _problem(actual: Grid, expected: Grid) -> str:
    if actual == expected:
        return ""
    if [[bool(cell) for cell in row] for row in actual] != [
        [bool(c) for c in row] for row in expected
    ]:
        return f"the cells are in the wrong places; it gives {actual}, and should give {expected}."
    wrong = {
        (a, b)
        for left, right in zip(actual, expected, strict=True)
        for a, b in zip(left, right, strict=True)
        if a != b
    }
    corrections = ", ".join(f"{a} should be {b}" for a, b in sorted(wrong))
    return f"the places are right, the colors are not: {corrections}."


@asynccontextmanager
async def solver() -> AsyncIterator[str]:
    """Yield the model string of KEDGE_MODEL, or of a local server with a script."""
    if model := os.environ.get("KEDGE_MODEL"):
        yield model
        return
    with serve(model=PracticeModel(Script.load(HERE / "puzzle_script.toml"))) as server:
        yield f"responses:{server.base_url}#practice"


async def solve(url: str = "sqlite://:memory:", **options: Any) -> RefineResult:
    """Refine the rule until it solves every training pair."""
    async with solver() as model, open_store(url) as store:
        return await refine(TASK, judge=check, store=store, engine=model, rounds=6, **options)


def main() -> None:
    """Print each round and the result for the test grid."""
    result = run_sync(solve())
    for each in result.rounds:
        print(f"round {each.number}: {each.answer}  score {each.verdict.score}")
        if each.verdict.critique:
            print(f"  {each.verdict.critique}")
    grid = follow(json.loads(result.answer)["steps"], PUZZLE["test"]["input"])
    print("the test grid becomes:")
    for row in grid:
        print("  " + " ".join(map(str, row)))
    print("solved" if grid == PUZZLE["test"]["output"] else "not solved")


if __name__ == "__main__":
    main()
