"""Tests that public names, errors, variables, settings, routes, headers and extras are documented.

The tests beside the code (``tests/*/test_docs_*.py``) compare tables with it: events, routes of the
server and of the page, operations of the API, faults, settings, metrics, commands and options. This module checks
the rest. Each check returns what is missing, so that a test can pass it a name that does not exist.
"""

import inspect
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
from starlette.routing import Route

import kedge
from kedge import errors
from kedge.chaining import rewrite
from kedge.chaining.proxy import create_proxy_app
from kedge.cli.chat_session import SLASH_COMMANDS
from kedge.config.settings import SETTINGS
from kedge.events.run import ResendReason
from kedge.evidence import server_evidence
from kedge.mcp import server as mcp_server
from kedge.planning.cache_plan import CacheHint, CacheMiss
from kedge.providers.clients import ConnectSettings
from kedge.server import app as server_app
from kedge.server.settings import Settings
from kedge.tools import ToolOutcome
from kedge.tools.toolbox import ExecutionOptions
from kedge.workflows.results import WorkflowEvent

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kedge"
PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
WRITTEN = "\n".join(text for name, text in PAGES.items() if not name.startswith("reference/"))
ENVIRONMENT = re.compile(
    r"(ANTHROPIC|AZURE|ENABLE|KEDGE|NO|OLLAMA|OPENAI|OTEL|XAI|XDG)_[A-Z_]+(?<!_TIERS)"
)


def find_unmentioned(names: Iterable[str], text: str = WRITTEN) -> list[str]:
    """Return the names that the text does not contain as words."""
    return [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", text)]


def test_every_root_name_is_on_a_page() -> None:
    """Every root name is on a page outside of the generated reference."""
    assert find_unmentioned(kedge.__all__) == []


def test_every_error_is_documented() -> None:
    """Every error class is on docs/errors.md, which states its cause and remedy."""
    names = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.KedgeError)
    ]
    assert names
    assert find_unmentioned(names, PAGES["errors.md"]) == []


def test_every_environment_variable_is_on_a_page() -> None:
    """Every environment variable in the source and in the settings is on a page."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    names = {text for text in re.findall(r'"(\w+)"', source) if ENVIRONMENT.fullmatch(text)}
    assert {"OPENAI_API_KEY", "OLLAMA_HOST", "KEDGE_PRICES"} <= names
    assert find_unmentioned(sorted(names | {each.env for each in SETTINGS.values()})) == []


def test_every_setting_of_connect_is_documented() -> None:
    """docs/engines.md describes each setting of ``connect``."""
    assert find_unmentioned(ConnectSettings.__optional_keys__, PAGES["engines.md"]) == []


def test_every_setting_of_the_test_server_is_documented() -> None:
    """Every keyword of ``kedge.testing.serve`` is on docs/server.md."""
    names = [f"`{name}`" for name in Settings.__dataclass_fields__]
    assert [name for name in names if name not in PAGES["server.md"]] == []


STORE_TOOLS = mcp_server.StoreTools(Mock(), Mock()).to_toolbox()
VALUES: dict[str, list[str]] = {
    "cli.md": [name for name, each in SLASH_COMMANDS.items() if each.help],
    "conversations.md": [name for name in vars(kedge.Conversation) if not name.startswith("_")],
    "engines.md": [*get_args(ResendReason), "format", *get_args(server_evidence.Trust)],
    "mcp.md": [each["name"] for each in STORE_TOOLS.definitions()],
    "prompt-caching.md": [*get_args(CacheHint), *filter(None, get_args(CacheMiss))],
    "server.md": [route.path for route in server_app.WEBSOCKET_ROUTES],
    "tools.md": [*ExecutionOptions.__annotations__, *get_args(ToolOutcome)],
    "workflows.md": [event.__name__ for event in get_args(WorkflowEvent)],
}
"""Page -> commands, methods, reasons, tools, routes and events that it must name."""


@pytest.mark.parametrize("page", VALUES)
def test_every_value_is_on_its_page(page: str) -> None:
    """A page names each value that a user may pass, call or receive."""
    assert VALUES[page]
    code = "\n".join(re.findall(r"`[^`\n]+`", PAGES[page]))
    assert [name for name in VALUES[page] if not re.search(rf"(?<!\w){name}\b", code)] == []


def test_every_route_of_the_proxy_is_documented() -> None:
    """Every route that the proxy does not forward is on docs/adoption.md."""
    proxy = create_proxy_app("http://127.0.0.1:9/v1")
    paths = {route.path for route in proxy.routes if isinstance(route, Route)} - {"/v1/{path:path}"}
    assert paths
    assert [path for path in paths if f"`{path}`" not in PAGES["adoption.md"]] == []


def test_every_reason_for_passing_through_is_documented() -> None:
    """The table of reasons on docs/adoption.md equals that of the code."""
    rows = [f"| `{name}` | {text} |" for name, text in rewrite.PASS_THROUGH_REASONS.items()]
    assert "\n".join(rows) in PAGES["adoption.md"]


def test_every_header_is_documented() -> None:
    """docs/formats.md has every header of Kedge that the code reads or writes."""
    page = PAGES["formats.md"]
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    headers = set(re.findall(r'"((?:x-kedge-|kedge-server)[a-z-]*)"', source))
    assert "x-kedge-plan" in headers
    assert sorted(re.findall(r"^\| `((?:x-)?kedge-[a-z-]+)`", page, re.MULTILINE)) == sorted(
        headers
    )


def test_every_dependency_and_extra_is_documented() -> None:
    """docs/installation.md has every dependency and extra; ``make install-size`` prints the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = PAGES["installation.md"]
    required = sorted(re.split(r"[^\w-]", each)[0] for each in project["dependencies"])
    assert sorted(re.findall(r"^\| `([\w-]+)` \| .+ \| \d", page, re.MULTILINE)) == required
    extras = sorted(project["optional-dependencies"])
    assert sorted(re.findall(r"^\| `kedge-llm\[(\w+)\]` \| .+ \|$", page, re.MULTILINE)) == extras


def test_the_checks_report_missing_names() -> None:
    """Each check reports a name that does not exist."""
    assert find_unmentioned(["Turn", "TurnOfTheScrew", "KEDGE_NO_SUCH"]) == [
        "TurnOfTheScrew",
        "KEDGE_NO_SUCH",
    ]
