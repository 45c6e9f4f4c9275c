"""An MCP server without a library, used to simulate faulty servers: ``python raw_server.py MODE``.

It starts fast and can violate the protocol in ways that the official package does not allow. It writes
its process id and those of its children to the file in ``PID_FILE``, so that a test can check that they
have ended.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NIL_SCHEMA = {
    "type": "object",
    "properties": {
        "any": None,
        "inner": {"type": "object", "properties": None, "required": None},
        "required": {"enum": ["a", None], "default": None},
    },
    "required": None,
    "additionalProperties": None,
}
"""A schema as of a program that writes null for an empty list or map."""
HUGE = 3_000_000
COMPLETE = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Members of a result that the newest protocol version requires and older versions ignore."""
CALLS: list[str] = []


def write(message: dict[str, Any]) -> None:
    """Write one message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def record_pid(pid: int) -> None:
    """Append a process id to the file of the test."""
    with Path(os.environ["PID_FILE"]).open("a", encoding="utf-8") as file:
        file.write(f"{pid}\n")


def list_tools() -> list[dict[str, Any]]:
    """Return the tools of the current mode."""
    names = ["echo", "more"] if CALLS and MODE == "change" else ["echo"]
    match MODE:
        case "duplicates":
            names = ["echo", "echo", "a.b", "a/b", "a_b", "c.d", "", "x" * 100, "x" * 101]
        case "reordered":
            names = ["a_b", "a/b", "a.b"]
        case "many":
            names = [f"tool_{number}" for number in range(300)]
        case "schemas":
            big = {"type": "object", "properties": {"x" * HUGE: {"type": "string"}}}
            deep = '{"a":' * 150 + "1" + "}" * 150
            return [
                {"name": "big", "inputSchema": big},
                {"name": "deep", "inputSchema": {"type": "object", "x": json.loads(deep)}},
                {"name": "long", "inputSchema": SCHEMA, "description": "d" * HUGE},
            ]
        case "control":
            hidden = "echo\x1b]0;x\x07 \U000e0041\U000e0042 \x00end"
            named = {"type": "object", "properties": {"text": {"description": "a\x1bb"}}}
            return [{"name": "e\x1bcho", "description": hidden, "inputSchema": named}]
        case "untyped":
            properties = {"text": {"type": "string"}}
            return [
                {"name": "untyped", "inputSchema": {"properties": properties}, "icons": 5},
                {"name": "missing", "description": None},
                {"name": "text", "inputSchema": "object"},
                {"name": "wrong", "inputSchema": {"properties": [1]}},
                {"inputSchema": SCHEMA},
                "echo",  # type: ignore[list-item]
                {"name": "echo", "inputSchema": SCHEMA},
            ]
        case "propertyless":
            return [
                {"name": "bare", "inputSchema": {"type": "object"}},
                {"name": "null", "inputSchema": {"type": "object", "properties": None}},
                {"name": "nil", "inputSchema": NIL_SCHEMA},
            ]
    return [{"name": name, "description": "Echo.", "inputSchema": SCHEMA} for name in names]


def call_tool(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a call, or None to send no response."""
    match MODE:
        case "crash":
            sys.stderr.write("fatal: password=hunter22 \x1b[31m\n")
            sys.stderr.flush()
            os._exit(7)
        case "change":
            CALLS.append(params["name"])
            write({"method": "notifications/tools/list_changed"})
            return {"content": []}
        case "hang":
            return None
        case "huge":
            return {"content": [{"type": "text", "text": "z" * HUGE}]}
        case "endless":
            while True:
                sys.stdout.write("x" * 1_000_000)
        case "control":
            return {"content": [{"type": "text", "text": "a\x1b[2Jb\x00c\u200dd\te\n\U000e0041"}]}
        case "items":
            return {"content": [{"type": "text", "text": str(n)} for n in range(5_000)]}
        case "given":
            return params["arguments"]["result"]
        case "input":
            return {"resultType": "input_required", "requestState": "x"}
        case "environment" | "duplicates":
            text = json.dumps(dict(os.environ)) if MODE == "environment" else params["name"]
            return {"content": [{"type": "text", "text": text}]}
        case _:
            text = json.dumps(params.get("arguments")) + (" \ud83d" if MODE == "surrogates" else "")
            return {"content": [{"type": "text", "text": text}]}


def answer(request: dict[str, Any]) -> None:
    """Respond to a request; ``server/discover`` (since 2026-07-28) is known only in the mode ``input``."""
    number, params = request["id"], request.get("params", {})
    match request["method"]:
        case "initialize":
            capabilities = {"tools": {"listChanged": True}}
            info = {"name": "raw", "version": "1"}
            result: dict[str, Any] | None = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {} if MODE == "toolless" else capabilities,
                "serverInfo": info,
            }
        case "server/discover" if MODE == "input":
            result = {
                "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {}},
                **COMPLETE,
            }
        case "tools/list" if MODE == "pages":
            cursor = int(params.get("cursor", 0))
            tools = [{"name": f"t{cursor}", "inputSchema": SCHEMA}]
            result = {"tools": tools, "nextCursor": str(cursor + 1)}
        case "tools/list" if len(CALLS) < 2 and MODE != "unlisted":
            result = {"tools": list_tools(), **COMPLETE}
        case "tools/call" if MODE == "enormous":
            digits = "1" + "0" * 5_000
            sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"n": {digits}}}}}\n')
            sys.stdout.flush()
            return
        case "tools/call" if MODE == "code" and not CALLS:
            CALLS.append(params["name"])
            write({"id": number, "error": {"code": -32000, "message": "rate limited"}})
            return
        case "tools/list" if MODE == "unlisted":
            result = {"tools": "echo"}
        case "tools/call" if MODE != "reject":
            result = call_tool(params)
        case _:
            write({"id": number, "error": {"code": -32601, "message": "no such method"}})
            return
    if result is not None:
        write({"id": number, "result": result})


def misbehave_at_startup() -> None:
    """Run the faults of the mode that happen before the first message."""
    match MODE:
        case "exit":
            sys.stderr.write("cannot start: token=abcdefgh \x1b[31mbad\n")
            sys.exit(3)
        case "garbage":
            sys.stdout.write("Welcome to the \x1b[31mserver!\n\n")
        case "garbage_only":
            sys.stdout.write("not json\n")
            sys.stdout.flush()
            sys.exit(4)
        case "silent":
            time.sleep(600)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            script = "import time; time.sleep(600)"
            record_pid(subprocess.Popen([sys.executable, "-c", script]).pid)


def main() -> None:
    """Serve in the mode given on the command line."""
    record_pid(os.getpid())
    misbehave_at_startup()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            answer(message)
    if MODE == "stubborn":
        time.sleep(600)


if __name__ == "__main__":
    main()
