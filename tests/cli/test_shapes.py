"""The JSON of commands and of the API has the same members, with equal values, for the same thing."""

from pathlib import Path
from typing import Any

from cli.sample_store import run_json as run_command_json
from web.conftest import serve_page


def run_json(folder: Path, *arguments: str) -> Any:
    """Run a command on the store of a page, and return its JSON."""
    return run_command_json(*arguments, "--store", f"sqlite:///{folder / 'kedge.db'}")


def test_commands_and_api_have_one_shape(tmp_path: Path) -> None:
    """Conversations, nodes, plans and replies have one shape."""
    with serve_page(tmp_path) as page:
        name = page.create_conversation("Hello", title="Harbour")
        path = f"/api/conversations/{name}"
        turn = page.post(f"{path}/turns", text="What is 2+3?")
        assert run_json(tmp_path, "conversations") == page.get("/api/conversations")["data"]
        nodes = {each["node"]: each for each in run_json(tmp_path, "tree", name)["nodes"]}
        for node in page.get(f"{path}/chain")["nodes"]:
            assert node["response"] == nodes[node["node"]]["response"]
            assert nodes[node["node"]].keys() >= node.keys()
        plan = run_json(tmp_path, "inspect", name, "--model", f"responses:{page.url}/v1#practice")
        future = page.get(f"{path}/plan", text="x")
        assert plan["plan"].keys() >= future.keys() == turn["plan"].keys()
        past = page.get(f"{path}/plans/{turn['node']}")
        same = ("mode", "anchor", "reason", "sent_blocks", "full_blocks")
        assert [past[each] for each in same] == [turn["plan"][each] for each in same]
    reply = run_json(tmp_path, "chat", "Hello", "--model", "practice")
    assert turn.keys() - {"plan"} == reply.keys() - {"requests"}
    assert reply["requests"][0].keys() == turn["plan"].keys()
