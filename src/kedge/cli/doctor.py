"""``kedge doctor``: whether everything is in place, with advice where it is not.

Without ``--online`` nothing leaves this machine. Keys are shown masked. The exit code is 1 if something
is wrong, and 0 if there are only notes.
"""

import os
import platform
import sqlite3
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import click

from kedge.cli.base import CommandError, dim, echo, echo_json, get_config
from kedge.cli.base import command as kedge_command
from kedge.config import (
    SETTINGS,
    Config,
    config_path,
    data_dir,
    mask,
    mask_url,
    store_file,
    store_url,
)
from kedge.config.settings import CHAINING_ENV, is_chaining_enabled
from kedge.errors import InvalidSetting, KedgeError

CheckState = Literal["ok", "note", "wrong"]

REQUIRED_PACKAGES = (
    "openai",
    "pydantic",
    "starlette",
    "uvicorn",
    "tiktoken",
    "rich",
    "prometheus-client",
    "cryptography",
)
OPTIONAL_PACKAGES = {
    "anthropic": ("anthropic", "Anthropic's models"),
    "psycopg": ("postgres", "conversations in PostgreSQL"),
    "opentelemetry-api": ("otel", "traces"),
    "dbos": ("dbos", "batches over many machines"),
}
KEY_VARIABLES = {
    "OPENAI_API_KEY": "openai:…",
    "XAI_API_KEY": "xai:…",
    "AZURE_OPENAI_API_KEY": "azure:…",
    "ANTHROPIC_API_KEY": "anthropic:…",
    "KEDGE_API_KEY": "responses:<url>#model",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was found, and what to do about it."""

    name: str
    state: CheckState
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as JSON."""
        return asdict(self)


def check_versions() -> Iterator[Check]:
    """Python, Kedge, and the packages it stands on."""
    machine = f"{platform.system()} {platform.machine()}"
    yield Check("python", "ok", f"{platform.python_version()} on {machine}")
    yield Check("kedge", "ok", metadata.version("kedge"))
    missing = [name for name in REQUIRED_PACKAGES if not _package_version(name)]
    found = ", ".join(
        f"{name} {_package_version(name)}" for name in REQUIRED_PACKAGES if _package_version(name)
    )
    advice = f"Install Kedge again: {', '.join(missing)} missing." if missing else ""
    yield Check("packages", "wrong" if missing else "ok", found, advice)
    there = [
        f"{extra} ({name} {_package_version(name)})"
        for name, (extra, _) in OPTIONAL_PACKAGES.items()
        if _package_version(name)
    ]
    absent = [
        f"{extra} ({use})"
        for name, (extra, use) in OPTIONAL_PACKAGES.items()
        if not _package_version(name)
    ]
    hint = f"pip install 'kedge[…]' for: {', '.join(absent)}." if absent else ""
    yield Check("extras", "ok", ", ".join(there) or "none", hint)


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_config() -> tuple[Config, list[Check]]:
    """The configuration, and what is to be said of it; a broken file counts as none."""
    try:
        config = get_config()
    except CommandError as failure:
        path = config_path()
        advice = f"Mend that line, or move {path} away."
        return Config(path, {}, os.environ), [Check("config", "wrong", failure.message, advice)]
    return config, [_check_file(config), *_check_environment(config)]


def _check_file(config: Config) -> Check:
    """The file: there, and not for everybody's eyes if it holds secrets."""
    path = config.path
    if not path.exists():
        return Check("config", "ok", f"no file at {path}; everything has its default")
    secrets = [name for name in config.file_values if SETTINGS[name].secret]
    if secrets and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) and os.name == "posix":
        advice = f"It holds {', '.join(secrets)}, and others can read it: chmod 600 {path}"
        return Check("config", "note", str(path), advice)
    return Check("config", "ok", str(path))


def _check_environment(config: Config) -> Iterator[Check]:
    """The variables of the environment can be read as what they are for."""
    for name in SETTINGS:
        try:
            config.find(name)
        except InvalidSetting as error:
            yield Check("environment", "wrong", str(error), "Set it anew, or unset it.")


def check_keys(environ: Mapping[str, str]) -> Iterator[Check]:
    """Which keys are set, masked; and whether chaining is switched off."""
    found = False
    for variable, serves in KEY_VARIABLES.items():
        key = environ.get(variable, "")
        if not key.strip():
            continue
        found = True
        if key.strip().isascii() and key.strip().isprintable():
            yield Check(variable, "ok", f"{mask(key)}, for {serves}")
        else:
            yield Check(variable, "wrong", "holds characters that no key has", "Set it anew.")
    if not found:
        advice = f"Set {', '.join(KEY_VARIABLES)} for other models than the built-in one."
        yield Check("keys", "note", "none is set; the practice model needs none", advice)
    if not is_chaining_enabled():
        yield Check(CHAINING_ENV, "note", "chaining is switched off", "Unset it to chain again.")


def check_databases(config: Config) -> Iterator[Check]:
    """The server's database, and the store of conversations."""
    yield check_sqlite("server.db", Path(config["serve.db"] or data_dir() / "server.db"))
    address = store_url(config["store"], create=False)
    file = store_file(address)
    if file is None:
        yield _check_version(address, mask_url(address))
        return
    folder = file.absolute().parent
    if not folder.exists() and folder != data_dir().absolute():
        advice = f"Make the folder ({folder}), or name another file."
        yield Check("store", "wrong", f"{file} cannot be made: its folder is not there", advice)
        return
    found = check_sqlite("store", file)
    sound = found.state == "ok" and file.exists()
    yield _check_version(f"{address}?mode=ro", str(file)) if sound else found


def check_sqlite(name: str, path: Path) -> Check:
    """A file of SQLite: opened for reading only, looked through quickly."""
    if str(path) == ":memory:":
        return Check(name, "ok", "in memory: nothing is kept")
    if not path.exists():
        return Check(name, "ok", f"{path} is not there yet; it is made when it is needed")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        advice = "Move it away and let a new one be made, or bring back a copy."
        return Check(name, "wrong", f"{path} cannot be read: {error}", advice)
    if sound != "ok":
        advice = "Bring back a copy; 'sqlite3 FILE .recover' may save the rest."
        return Check(name, "wrong", f"{path} is damaged: {sound}", advice)
    size = path.stat().st_size / 1e6
    return Check(name, "ok", f"{path}, {size:.1f} MB, schema {version}")


def _check_version(address: str, shown: str) -> Check:
    """The schema of the store against the one that this Kedge writes."""
    from kedge.event_loops import run_sync
    from kedge.store.migrate import load_migrations, read_schema_version
    from kedge.store.open import open_database

    async def look() -> tuple[int, int]:
        database = open_database(address)
        try:
            found = await database.read(read_schema_version)
        finally:
            await database.aclose()
        return found, len(load_migrations(database.dialect.name))

    try:
        found, newest = run_sync(look())
    except KedgeError as error:
        advice = "Look at the address, the password, and whether the database runs."
        return Check("store", "wrong", f"{shown} cannot be opened: {error}", advice)
    if found > newest:
        advice = "A newer Kedge wrote it: install that one."
        return Check("store", "wrong", f"{shown}, schema {found} of {newest} known", advice)
    older = f" of {newest}; it is brought up to date when it is opened" if found < newest else ""
    return Check("store", "ok", f"{shown}, schema {found}{older}")


@dataclass(frozen=True, slots=True)
class ProviderEndpoint:
    """Where a provider answers ``GET /models``, and how it wants the key."""

    provider: str
    key_variable: str
    base_url: str = ""
    url_variable: str = ""
    header: str = "Authorization"
    key_prefix: str = "Bearer "
    path: str = ""
    """What follows the address that the variable holds."""
    extra_headers: tuple[tuple[str, str], ...] = ()


ENDPOINTS = (
    ProviderEndpoint("openai", "OPENAI_API_KEY", "https://api.openai.com/v1", "OPENAI_BASE_URL"),
    ProviderEndpoint("xai", "XAI_API_KEY", "https://api.x.ai/v1"),
    ProviderEndpoint(
        "azure",
        "AZURE_OPENAI_API_KEY",
        url_variable="AZURE_OPENAI_ENDPOINT",
        header="api-key",
        key_prefix="",
        path="/openai/v1",
    ),
    ProviderEndpoint(
        "anthropic",
        "ANTHROPIC_API_KEY",
        "https://api.anthropic.com/v1",
        "ANTHROPIC_BASE_URL",
        header="x-api-key",
        key_prefix="",
        path="/v1",
        extra_headers=(("anthropic-version", "2023-06-01"),),
    ),
)


def check_providers(environ: Mapping[str, str], model: str, timeout: float) -> Iterator[Check]:
    """Ask every provider whose key is set, and the server of the configured model, all at once."""
    asked = [place for place in ENDPOINTS if environ.get(place.key_variable)]
    asked += _configured_endpoint(model, environ)
    if not asked:
        yield Check("online", "note", "no key is set and no server configured: nobody to ask")
        return
    with ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(check_endpoint, place, environ, timeout) for place in asked]
        yield from (each.result() for each in running)


def _configured_endpoint(model: str, environ: Mapping[str, str]) -> list[ProviderEndpoint]:
    """The server of the configured model, if it is none of the providers above."""
    kind, _, rest = model.partition(":")
    if kind == "ollama":
        from kedge.providers.registry import resolve_ollama_url

        return [ProviderEndpoint("ollama", "", resolve_ollama_url(environ.get("OLLAMA_HOST", "")))]
    address = rest.rpartition("#")[0]
    return [ProviderEndpoint(kind, "KEDGE_API_KEY", address)] if "://" in address else []


def check_endpoint(endpoint: ProviderEndpoint, environ: Mapping[str, str], timeout: float) -> Check:
    """One request for the list of models: the smallest thing that needs a key."""
    given = environ.get(endpoint.url_variable, "").rstrip("/") if endpoint.url_variable else ""
    base = given.removesuffix(endpoint.path) + endpoint.path if given else endpoint.base_url
    address = f"{base.rstrip('/')}/models"
    name, shown = f"reach {endpoint.provider}", mask_url(address)
    request = urllib.request.Request(  # noqa: S310 - an address from our table or the user's settings
        _strip_credentials(address), headers=dict(endpoint.extra_headers)
    )
    key = environ.get(endpoint.key_variable, "").strip() if endpoint.key_variable else ""
    if key:
        request.add_header(endpoint.header, f"{endpoint.key_prefix}{key}")
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310 - the same
            took = (time.perf_counter() - started) * 1000
            return Check(name, "ok", f"{shown} answered in {took:.0f} ms")
    except urllib.error.HTTPError as error:
        error.close()
        return _describe_status(name, shown, endpoint.key_variable, error.code)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or type(error).__name__
        advice = "Look at the address, the network and the proxy; --timeout waits longer."
        return Check(name, "wrong", f"{shown} cannot be reached: {why}", advice)


def _strip_credentials(address: str) -> str:
    """The address as ``urlopen`` takes it; it would read a name and a password as a host."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _describe_status(name: str, shown: str, key: str, status: int) -> Check:
    if status in (401, 403):
        return Check(name, "wrong", f"{shown} refuses the key ({status})", f"Set {key} anew.")
    if status in (404, 405):
        return Check(name, "ok", f"{shown} is there, and has no list of models ({status})")
    return Check(name, "note", f"{shown} answered {status}", "It may be in trouble; try later.")


STATE_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


@kedge_command(
    "doctor", tolerant=True, short_help="Look whether everything is in place, with advice."
)
@click.option("--online", is_flag=True, help="Ask the providers whose keys are set, too.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), help="Seconds to wait for a provider.  [default: 10]"
)
def command(online: bool, timeout: float | None, as_json: bool) -> None:
    """Look whether everything is in place: versions, keys, databases, configuration.

    With --online, also whether the providers can be reached with the keys that are set.
    """
    config, found = check_config()
    checks = [*check_versions(), *found, *check_keys(os.environ), *check_databases(config)]
    if online:
        checks += check_providers(os.environ, config["model"], timeout or config["timeout"])
    wrong = [check for check in checks if check.state == "wrong"]
    if as_json:
        echo_json({"ok": not wrong, "checks": [check.to_json() for check in checks]})
    else:
        _print_checks(checks)
        _print_summary(wrong, online)
    if wrong:
        sys.exit(1)


def _print_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, color = STATE_MARKS[check.state]
        echo(f"{click.style(mark, fg=color)} {check.name:<{width}}  {check.found}")
        if check.advice:
            echo(f"  {'':<{width}}  {dim(check.advice)}")


def _print_summary(wrong: list[Check], online: bool) -> None:
    echo()
    echo(f"{len(wrong)} to mend." if wrong else "Everything is in place.")
    if not online:
        echo(dim("Providers were not asked; --online does."))
