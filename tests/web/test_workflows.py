"""Workflows through the API: starting, validating, following and stopping them."""

from pathlib import Path
from typing import Any

import pytest

from kedge.server.models import PracticeModel
from server.gated_model import GatedModel
from web.conftest import PageServer, serve_page
from web.test_api import parse_events

STEPS = [{"name": "sum", "prompt": "What is 2+3?"}, {"name": "next", "prompt": "What is {sum}"}]


def finish(page: PageServer, name: str) -> list[dict[str, Any]]:
    """Follow a workflow to its end and return its events, or an empty list if it is not running."""
    answer = page.client.get(f"/api/workflows/{name}/events")
    return parse_events(answer.text) if answer.is_success else []


def test_steps_are_started_and_finished(page: PageServer) -> None:
    """The workflow is stored when the request returns, and its conversation links to it."""
    workflow = page.post("/api/workflows", kind="steps", steps=STEPS)
    finish(page, workflow["id"])
    view = page.get(f"/api/workflows/{workflow['id']}")
    assert (view["kind"], view["status"]) == ("steps", "finished")
    assert workflow["id"] in {each["id"] for each in page.get("/api/workflows")["data"]}
    html = page.client.get(f"/workflows/{workflow['id']}").text
    assert "2+3 = 5." in html
    (conversation,) = view["conversations"].values()
    assert (
        f'href="/workflows/{workflow["id"]}"'
        in page.client.get(f"/conversations/{conversation}").text
    )


def test_workflow_uses_selected_models(tmp_path: Path) -> None:
    """A model can be set for all, the judge or a participant; an unknown model is rejected."""
    models = {name: PracticeModel() for name in ("small", "large")}
    sides = [{"name": "tea"}, {"name": "coffee", "model": "small"}]
    chosen = {"model": "large", "judge_model": "small"}
    body: dict[str, Any] = {"kind": "debate", **DEBATE, **chosen, "sides": sides}
    with serve_page(tmp_path, models=models, default="small") as page:
        workflow = page.post("/api/workflows", **body)
        finish(page, workflow["id"])
        names = page.get(f"/api/workflows/{workflow['id']}")["conversations"]
        used = {
            role: page.get(f"/api/conversations/{name}")["model"] for role, name in names.items()
        }
        assert used == {"tea": "large", "coffee": "small", "judge": "small"}
        rejected = page.client.post("/api/workflows", json={**body, "model": "none"})
        assert rejected.status_code == 400
        assert "choose a model of this server: small, large" in rejected.text
        assert len(page.get("/api/workflows")["data"]) == 1
        assert page.client.get("/workflows").text.count("<option>large</option>") == 2


COFFEE = {"name": "coffee", "brief": "Coffee is better."}
REFINE = {"question": "Write a haiku", "rubric": "It has three lines", "rounds": 1}
DEBATE = {"question": "Tea or coffee?", "rubric": "Who has the better reasons?", "rounds": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "refine", **REFINE},
        {"kind": "debate", **DEBATE, "sides": [{"name": "tea"}, COFFEE]},
    ],
)
def test_refinements_and_debates_are_started(page: PageServer, body: dict[str, Any]) -> None:
    """A refinement and a debate run with a model and a rubric as the judge."""
    workflow = page.post("/api/workflows", **body)
    finish(page, workflow["id"])
    view = page.get(f"/api/workflows/{workflow['id']}")
    assert view["kind"] == body["kind"]
    assert view["status"] != "running"
    (listed,) = [each for each in page.get("/api/workflows")["data"] if each["id"] == view["id"]]
    assert listed["conversations"] == view["conversations"] != {}
    html = page.client.get("/workflows").text
    assert body["question"] in html
    assert all(f"/conversations/{each}" in html for each in view["conversations"].values())
    shown = page.client.get(f"/workflows/{view['id']}").text
    exchanges = [each for chain in view["chains"] for each in chain["exchanges"]]
    assert exchanges
    assert all(each["response_id"] in shown for each in exchanges)


def test_invalid_workflow_is_rejected(page: PageServer) -> None:
    """A workflow without its required members is rejected with a 400 error."""
    for body, message in (
        ({"kind": "steps"}, "add at least one step"),
        ({"kind": "refine"}, "'question' is missing"),
        ({"kind": "refine", "question": "x"}, "'rubric' is missing"),
        ({"kind": "debate", "question": "x", "rubric": "y"}, "at least two"),
    ):
        answer = page.client.post("/api/workflows", json=body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)


def test_running_workflow_can_be_stopped(tmp_path: Any) -> None:
    """A stopped workflow remains stored and has the status interrupted."""
    with serve_page(tmp_path, models={"gated": GatedModel(), "other": PracticeModel()}) as page:
        steps = [{"name": "first", "prompt": "wait for me"}]
        workflow = page.post("/api/workflows", kind="steps", steps=steps)
        assert workflow["status"] == "running"
        assert "data-workflow=" in page.client.get(f"/workflows/{workflow['id']}").text
        assert page.post(f"/api/workflows/{workflow['id']}/stop")["status"] == "interrupted"
        assert page.client.post(f"/api/workflows/{workflow['id']}/stop").status_code == 404
        assert page.client.get(f"/api/workflows/{workflow['id']}/events").status_code == 404
        assert ">interrupted</span>" in page.client.get("/workflows").text
