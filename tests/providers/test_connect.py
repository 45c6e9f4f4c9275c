"""Test model strings, and the one-line errors for missing settings."""

import re
from base64 import b64encode
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from for_each import for_each
from kedge._internal.event_loops import run_sync
from kedge.engines import AnthropicEngine, ChatCompletionsEngine, ResponsesEngine
from kedge.errors import CannotConnect, InvalidSetting, UnknownSetting, Unreachable
from kedge.providers import connect, names_address, providers
from kedge.providers.registry import PROVIDERS, find_chat_settings, resolve_ollama_url
from kedge.testing import TestServer
from kedge.turns import Turn, user


@for_each(
    ("model", "message"),
    [
        ("openai:gpt-5.1", "set OPENAI_API_KEY"),
        ("xai:grok-4", "set XAI_API_KEY"),
        ("azure:mine", "set AZURE_OPENAI_API_KEY"),
        ("openai:", "openai:gpt-5.1"),
        ("opnai:gpt", "did you mean 'openai:gpt'?"),
        ("openai-responses:gpt-5.1", "did you mean 'openai:gpt-5.1'?"),
        ("openai_chat:gpt-5.1", "did you mean 'openai:gpt-5.1'?"),
        ("response:gpt-5.1", "did you mean 'openai:gpt-5.1'?"),
        ("response:http://127.0.0.1:1/v1#m", "did you mean 'responses:http://127.0.0.1:1/v1#m'?"),
        ("chats:llama", "there are: anthropic"),
        ("opnai", "there are: anthropic"),
        ("opnai:", "there are: anthropic"),
        ("practise", "did you mean 'practice'?"),
        ("practise:bigger", "there are: anthropic"),
        (
            "gpt-5.1",
            "a model string is PROVIDER:MODEL, such as openai:gpt-5.1; there are: anthropic",
        ),
        ("zzz", "practice"),
        ("responses:localhost", "responses:http://"),
        ("practice:bigger", "remove 'bigger'"),
        ("chat:localhost#m", "chat:http://"),
        ("chat:http://localhost:8080/v1", "chat:http://"),
        ("chat:http://localhost:8080/v1#a#m", "the address is invalid"),
        ("ollama:", "ollama:llama3.2"),
        ("anthropic:", "anthropic:claude-"),
        ("anthropic:http://127.0.0.1:1/v1#model", "pass it as base_url="),
        ("openai:http://127.0.0.1:1/v1#model", "or write responses:<url>#<model>"),
        ("claude-opus-4-8", "did you mean 'anthropic:claude-opus-4-8'?"),
        ("openai/gpt-5.1", "did you mean 'openai:gpt-5.1'?"),
        ("anthropic:claude-opus-4-8", "set ANTHROPIC_API_KEY"),
    ],
)
def test_missing_setting_is_reported_in_one_line(
    model: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key, an unknown name or an incomplete address raises an error with what to set."""
    for name in ("OPENAI_API_KEY", "XAI_API_KEY", "AZURE_OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CannotConnect) as exc_info:
        connect(model)
    assert message in str(exc_info.value)
    assert "\n" not in str(exc_info.value)


UNKNOWN_PROVIDERS = (
    "response",
    "openai-responses",
    "antropic",
    "chats",
    "olama",
    "azure-ai",
    "gpt-5.1",
)
RESTS = ("", ":", ":gpt-5.1", ":llama", ":practice", ":http://127.0.0.1:1/v1#m", "/gpt-5.1", "-x:m")


@for_each(("name", "rest"), product((*PROVIDERS, *UNKNOWN_PROVIDERS), RESTS))
def test_suggested_model_strings_are_accepted(
    name: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key for each provider, a model string that an error suggests connects."""
    for variable in ("OPENAI_API_KEY", "XAI_API_KEY", "AZURE_OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(variable, "k")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://kedge.openai.azure.com")
    try:
        connect(f"{name}{rest}")
    except CannotConnect as error:
        for suggestion in re.findall("did you mean '(.*?)'", str(error)):
            connect(suggestion)


def test_azure_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint comes from the environment, in both of its forms, and the path is added once; a blank is none."""
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", " ")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", " ")
    with pytest.raises(CannotConnect, match="AZURE_OPENAI_API_KEY"):
        connect("azure:mine")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "k")
    with pytest.raises(CannotConnect, match="AZURE_OPENAI_ENDPOINT"):
        connect("azure:mine")
    scopes: set[str] = set()
    for path in ("", "openai/v1/"):
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", f"https://mine.openai.azure.com/{path}")
        engine = connect("azure:mine")
        assert isinstance(engine, ResponsesEngine)
        scopes.add(engine.scope.rpartition("/")[0])
    assert scopes == {"azure/mine.openai.azure.com/openai/v1"}


def test_an_installed_package_adds_a_provider(
    kedge_server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point is found by its metadata, gets the settings, and cannot replace a built-in provider."""
    (tmp_path / "harbour.py").write_text(
        "from kedge.providers import connect\n\n\n"
        "def make(rest, **settings):\n"
        f"    return connect('responses:{kedge_server.base_url}#' + rest, **settings)\n"
    )
    metadata = tmp_path / "harbour-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: harbour\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[kedge.providers]\nharbour = harbour:make\npractice = harbour:fail\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    turn = run_sync(connect("harbour:practice", max_retries=0).run(Turn([user("What is 2+3?")])))
    assert "5" in str(turn.blocks[-1])
    assert kedge_server.requests[-1].path == "/v1/responses"
    assert isinstance(connect("practice"), ResponsesEngine)
    assert isinstance(providers()["practice"](""), ResponsesEngine)


@for_each(
    ("model", "expected"),
    [
        ("openai:gpt-5.1", False),
        ("practice", False),
        ("harbour:x", True),
        ("chat:http://h#m", True),
    ],
)
def test_a_model_string_may_name_an_address(model: str, expected: bool) -> None:
    """It does with an address in it, and may with a provider of another package."""
    assert names_address(model) is expected


def get_scope(model: str, **settings: Any) -> str:
    """Return the scope of an engine without sending a request."""
    settings.setdefault("api_key", "k-1234")
    engine = connect(model, **settings)
    assert isinstance(engine, ResponsesEngine)
    return engine.scope


OPENAI = "openai:gpt-5.1"


def test_a_scope_names_the_provider_and_the_address() -> None:
    """It has a hash of the key, and nothing in place of a missing one."""
    scope = get_scope(OPENAI)
    assert scope.startswith("openai/api.openai.com/v1/")
    assert "1234" not in scope
    local = "responses:http://localhost:8484/v1/#m"
    assert get_scope(local, api_key=None) == "responses/localhost:8484/v1"


def test_credentials_in_headers_are_part_of_the_scope() -> None:
    """Each account has a scope of its own; other headers make no difference."""
    accounts: list[dict[str, Any]] = [
        {},
        {"api_key": "other"},
        {"default_headers": {"Authorization": "Bearer c"}},
        {"default_headers": {"Helicone-Auth": "Bearer a"}},
        {"default_headers": {"Helicone-Auth": "Bearer b"}},
    ]
    assert len({get_scope(OPENAI, **settings) for settings in accounts}) == len(accounts)
    assert get_scope(OPENAI, default_headers={"X-Tag": "t"}) == get_scope(OPENAI)


def test_the_project_is_part_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project from the environment counts as one in the settings."""
    plain = get_scope(OPENAI)
    project = get_scope(OPENAI, project="proj_1")
    assert project != plain
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj_1")
    assert get_scope(OPENAI) == project


def test_headers_of_the_environment_are_part_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers in the settings precede them, and they are not sent to other providers."""
    plain = get_scope(OPENAI)
    other_provider = get_scope("xai:grok-4")
    login: dict[str, Any] = {"default_headers": {"Authorization": "Bearer c"}}
    explicit = get_scope(OPENAI, **login)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Tag: t\nAuthorization: Bearer b")
    assert get_scope(OPENAI) not in (plain, explicit)
    assert get_scope(OPENAI, **login) == explicit
    assert get_scope("xai:grok-4") == other_provider


def test_openai_headers_are_sent_to_openai_only(
    kedge_server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would send them and its organization to every server; what the caller sets is always sent."""
    secret = "X-Gateway: gate-1\nauthorization: Bearer sk-openai\nX-Mine: theirs\nno header"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", secret)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    address = f"responses:{kedge_server.base_url}#practice"
    own = {"default_headers": {"X-Mine": "mine"}, "organization": "org-2"}
    cases: list[dict[str, Any]] = [{}, {"api_key": "sk-abc"}, own]
    for settings in cases:
        run_sync(connect(address, **settings).run(Turn([user("Hello")])))
    names = ("authorization", "x-mine", "openai-organization", "x-gateway")
    assert [[each.headers.get(name) for name in names] for each in kedge_server.requests] == [
        ["Bearer none", None, None, None],
        ["Bearer sk-abc", None, None, None],
        ["Bearer none", "mine", "org-2", None],
    ]
    monkeypatch.setenv("OPENAI_BASE_URL", kedge_server.base_url)
    for given, expected in (({}, ["theirs", "gate-1"]), ({"x-mine": "mine"}, ["mine", "gate-1"])):
        engine = connect("openai:practice", api_key="sk-abc", default_headers=given)
        run_sync(engine.run(Turn([user("Hello")])))
        sent = kedge_server.requests[-1].headers
        assert [sent["x-mine"], sent["x-gateway"]] == expected


def test_key_is_stripped_of_line_end(kedge_server: TestServer) -> None:
    """A key read from a file works; an invalid key is rejected without being quoted."""
    address = f"responses:{kedge_server.base_url}#practice"
    run_sync(connect(address, api_key="sk-abc\n").run(Turn([user("Hello")])))
    assert kedge_server.requests[-1].headers["authorization"] == "Bearer sk-abc"
    with pytest.raises(CannotConnect, match="set it again") as exc_info:
        connect(address, api_key="sk-ab\u2026c")
    assert "sk-ab" not in str(exc_info.value)


def test_password_in_url_is_sent_as_header(kedge_server: TestServer) -> None:
    """It is sent as basic authentication, unless the caller sets another header, and is not in scope and URL."""
    for name in ("ann", "annx"):
        address = kedge_server.base_url.replace("://", f"://{name}:p%40ss@")
        engine = connect(f"responses:{address}#practice", max_retries=0)
        assert isinstance(engine, ResponsesEngine)
        assert "ann" not in engine.scope
        run_sync(engine.run(Turn([user("hi")])))
    headers = {"Authorization": "Bearer own"}
    engine = connect(f"responses:{address}#practice", default_headers=headers)
    run_sync(engine.run(Turn([user("hi")])))
    first, second, last = kedge_server.requests
    assert last.headers["authorization"] == "Bearer own"
    basic = b64encode(b"ann:p@ss").decode()
    assert (first.path, first.headers["authorization"]) == ("/v1/responses", f"Basic {basic}")
    assert second.headers["authorization"] != f"Basic {basic}"


@for_each(
    ("host", "address"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),  # noqa: S104 - of a server elsewhere
        ("0.0.0.0:8080", "http://127.0.0.1:8080/v1"),
        (":8080", "http://127.0.0.1:8080/v1"),
        ("box.local", "http://box.local:11434/v1"),
        ("http://box.local", "http://box.local:80/v1"),
        ("https://box.local/ollama/", "https://box.local:443/ollama/v1"),
        (" 'http://box:1' ", "http://box:1/v1"),
        ("[::1]:9", "http://[::1]:9/v1"),
        ("[::]:9", "http://127.0.0.1:9/v1"),
    ],
)
def test_ollama_host_is_used(host: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``OLLAMA_HOST`` is accepted in every form that Ollama itself accepts."""
    monkeypatch.setenv("OLLAMA_HOST", host)
    engine = connect("ollama:llama3.2")
    assert isinstance(engine, ChatCompletionsEngine)
    assert engine.name == "ollama"
    assert resolve_ollama_url(host) == address
    assert engine.scope.startswith("ollama/")


def test_anthropic_variables_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key and address are read from the environment, and the account is part of the scope."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-1")
    engine = connect("anthropic:claude-opus-4-8")
    assert isinstance(engine, AnthropicEngine)
    assert engine.scope.startswith("anthropic/api.anthropic.com/")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://gateway.local/v1/")
    other = connect("anthropic:claude-opus-4-8")
    assert isinstance(other, AnthropicEngine)
    assert other.scope.startswith("anthropic/gateway.local/")
    assert "/v1/" not in other.scope
    assert "sk-ant-1" not in engine.scope + other.scope


@for_each(
    ("host", "model", "marks"),
    [
        ("openrouter.ai", "anthropic/claude-opus-4-8", True),
        ("openrouter.ai", "meta/llama-4", False),
        ("localhost:8080", "anthropic/claude-opus-4-8", False),
    ],
)
def test_cache_breakpoints_are_sent_to_known_models(host: str, model: str, marks: bool) -> None:
    """A chat server gets ``cache_control`` only if it is known to pass it on to a model that uses it."""
    assert find_chat_settings(host, model).get("cache_control", False) is marks


async def test_a_password_in_an_address_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The password is not in the error, which has advice about the address."""
    engine = connect("chat:http://ada:geheim@127.0.0.1:1/v1#m", max_retries=0)
    with pytest.raises(Unreachable) as exc_info:
        await engine.run(Turn([user("Hello")]))
    assert "correct its address (127.0.0.1:1)" in str(exc_info.value)
    assert "geheim" not in f"{exc_info.value} {caplog.text}"
    await engine.aclose()


@for_each("host", ["host:99999", "[::1", "[::g]", "a\u2100b"])
def test_an_invalid_address_is_reported(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impossible port, half of the brackets of an IPv6 address, and what is no name are errors with advice."""
    monkeypatch.setenv("OLLAMA_HOST", host)
    address = f"http://{host}/v1"
    settings: dict[str, Any]
    for model, settings in (
        (f"responses:{address}#m", {}),
        (f"chat:{address}#m", {}),
        ("openai:m", {"base_url": address, "api_key": "k"}),
        ("anthropic:m", {"base_url": address, "api_key": "k"}),
        ("ollama:m", {}),
    ):
        with pytest.raises(CannotConnect, match=r"the address (in OLLAMA_HOST )?is invalid"):
            connect(model, **settings)


@for_each(
    "settings",
    [
        {"timeout": 0},
        {"timeout": "1"},
        {"timeout": True},
        {"max_retries": -1},
        {"max_retries": None},
        {"default_headers": {"X-Token": "sk-2\n"}},
        {"default_headers": {"X-Token": "sk-2\ud83d"}},
        {"default_headers": {"X-Number": 5}},
        {"default_headers": {"X Token": "t"}},
        {"default_headers": {"": "t"}},
    ],
)
@for_each("model", ["responses:http://host/v1#m", "anthropic:claude-opus-4-8"])
def test_invalid_settings_of_the_client_are_reported(model: str, settings: dict[str, Any]) -> None:
    """A timeout, a number of retries or a header that cannot be used is rejected before the first request."""
    with pytest.raises(
        InvalidSetting, match=r"(timeout|max_retries|header .*) must (be|have)"
    ) as info:
        connect(model, api_key="sk-1", **settings)
    assert "sk-" not in str(info.value)


HOSTED = ["openai:m", "xai:m", "azure:m", "anthropic:m", "ollama:m"]
ADDRESSED = ["responses:http://127.0.0.1:1/v1#m", "chat:http://127.0.0.1:1/v1#m", "practice"]


@for_each("model", [*HOSTED, *ADDRESSED])
def test_listed_settings_are_those_that_are_accepted(model: str) -> None:
    """The settings that an error lists do not include one that is unknown, such as an address beside an address."""
    settings: dict[str, Any] = {"api_key": "k", "base_url": "http://127.0.0.1:1/v1"}
    if model in ADDRESSED:
        with pytest.raises(UnknownSetting, match="no setting 'base_url'"):
            connect(model, **settings)
        del settings["base_url"]
    connect(model, **settings)
    determined: dict[str, Any]
    for determined in ({"provider": "x"}, {"make_client": None}, {"rest": "x"}):
        with pytest.raises(UnknownSetting) as exc_info:
            connect(model, **settings, **determined)
        listed = str(exc_info.value).partition("The settings are: ")[2].rstrip(".").split(", ")
        assert ("base_url" in listed) is (model in HOSTED)
        assert not determined.keys() & set(listed)


@for_each(
    "model", ["practice", "ollama:llama3.2", "openai:gpt-5.1", "azure:d", "anthropic:claude-5"]
)
def test_unknown_settings_are_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled setting is an error with a suggestion, also without a key: to set the key does not help."""
    for variable in ("OPENAI_API_KEY", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    settings: dict[str, Any] = {"tmeout": 3}
    with pytest.raises(UnknownSetting, match="no setting 'tmeout'; did you mean 'timeout'"):
        connect(model, **settings)
    settings = {"colour": 1, "api_key": "k"}
    with pytest.raises(UnknownSetting, match="no setting 'colour'"):
        connect(model, **settings)


@for_each("name", ["organization", "project"])
def test_anthropic_has_no_owners(name: str) -> None:
    """They are not sent to Anthropic, so they must neither be ignored nor change the scope."""
    owner: Any = {name: "x"}
    with pytest.raises(UnknownSetting, match=f"no setting '{name}'") as exc_info:
        connect("anthropic:claude-5", api_key="k", **owner)
    listed = str(exc_info.value).partition("The settings are: ")[2]
    assert "organization" not in listed
    assert "project" not in listed


def test_a_model_must_be_text() -> None:
    """Anything but text raises an error that shows a model string; for a coroutine, that await is missing."""

    async def find_model() -> str:
        return "practice"

    model: Any = find_model()
    with pytest.raises(InvalidSetting, match="write await before the call"):
        connect(model)
    model.close()
