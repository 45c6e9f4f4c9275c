"""Items of hosted tools are stored without loss and sent again in a form that a server accepts."""

from typing import Any

from for_each import for_each
from kedge.server.schema.requests import check_create
from kedge.turns import Turn, block_from_item, dumps, item_from_block, loads

ITEMS: list[dict[str, Any]] = [
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {
        "type": "file_search_call",
        "id": "fs_1",
        "status": "completed",
        "queries": ["a"],
        "results": None,
    },
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "code": "1",
        "container_id": "c",
        "outputs": [],
    },
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "eA=="},
    {"type": "mcp_call", "id": "mcp_1", "name": "n", "arguments": "{}", "server_label": "s"},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
    {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "name": "n",
        "arguments": "{}",
        "server_label": "s",
    },
    {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "call_1",
        "status": "completed",
        "action": {"type": "screenshot"},
        "pending_safety_checks": [],
    },
    {
        "type": "apply_patch_call",
        "id": "apc_1",
        "call_id": "call_1",
        "status": "completed",
        "operation": {"type": "create_file", "path": "x", "diff": "y"},
    },
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_1",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
]


@for_each("item", ITEMS)
def test_server_accepts_its_own_items(item: dict[str, Any]) -> None:
    """The rendered item is valid, has the same content, and contains no local id."""
    block = loads(dumps(Turn([block_from_item(item)]))).blocks[0]
    sent = item_from_block(block)
    check_create({"model": "practice", "input": [sent]})
    retained = {k: v for k, v in item.items() if k not in ("id", "status") and v is not None}
    assert {k: v for k, v in sent.items() if k not in ("id", "status")} == retained
    assert sent.get("id") != block.id
    if item["type"] not in ("mcp_approval_request", "local_shell_call"):
        assert sent.get("id") != item["id"]
