"""Progress of a workflow on a terminal: a line for each thing that happened, and what is awaited."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import assert_never

from kedge.workflows.events import (
    Answered,
    Asked,
    Judged,
    Ruled,
    Watch,
    WorkflowEvent,
    WorkflowFinished,
    WorkflowStarted,
    unwatched,
)

WIDTH = 72


@contextmanager
def watching() -> Generator[Watch]:
    """Something that draws on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:

        def watch(event: WorkflowEvent) -> None:
            line, awaited = told(event)
            if line:
                console.print(line, markup=False)
            if awaited:
                status.update(awaited)

        yield watch


def told(event: WorkflowEvent) -> tuple[str, str]:
    """What is said about an event, and what is waited for from now on."""
    match event:
        case WorkflowStarted():
            verb = "goes on" if event.resumed else "begins"
            return f"{event.kind} {event.workflow} {verb}, at most {event.total}", "beginning"
        case Asked():
            return "", f"{event.number}: {event.role} is asked"
        case Answered():
            known = " (was there already)" if event.stored else ""
            return f"{event.number}: {event.role} says{known}: {first_line(event.text)}", ""
        case Judged():
            verdict = event.verdict
            words = "good" if verdict.passed else f"not yet: {first_line(verdict.critique)}"
            score = "" if verdict.score is None else f" [{verdict.score:g}]"
            return f"{event.number}: judged{score}: {words}", ""
        case Ruled():
            ruling = event.ruling
            words = f"over, {ruling.winner or 'nobody'} has won" if ruling.over else "it goes on"
            return f"{event.number}: ruled: {words}", ""
        case WorkflowFinished():
            return "", "done"
        case _:
            assert_never(event)


def first_line(text: str) -> str:
    """What a line of a terminal can hold of a text."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
