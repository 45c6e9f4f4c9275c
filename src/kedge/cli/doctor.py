"""``kedge doctor``, ``config`` and ``completion``: check and show the installation and the configuration.

Without ``--online`` nothing is sent anywhere. Keys are masked. The exit code is 1 if there is a problem,
and 0 if there are only notes.
"""

import asyncio
import errno
import os
import platform
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

import kedge
from kedge._internal.arguments import read_variable
from kedge._internal.display import capitalize, format_size, pluralize, sanitize_text
from kedge.cli.base import (
    CommandError,
    Result,
    dim,
    echo,
    get_config,
    kedge_command,
    print_table,
    wrap_text,
)
from kedge.config import (
    CONFIG_ENV,
    Config,
    config_path,
    data_dir,
    mask,
    mask_url,
    mask_value,
    store_file,
    store_url,
)
from kedge.config.settings import SETTINGS, format_value
from kedge.errors import EXTRAS, CannotServe, InvalidSetting, KedgeError

if TYPE_CHECKING:
    from kedge.engines.transport import Transport
    from kedge.evidence.server_evidence import ServerEvidence
    from kedge.store.database.schema import Schema
    from kedge.store.database.transactions import Tx

T = TypeVar("T")
CheckState = Literal["ok", "note", "wrong"]

SERVER_KEY = "KEDGE_API_KEY"
KEY_VARIABLES = {
    "OPENAI_API_KEY": "openai:…",
    "XAI_API_KEY": "xai:…",
    "AZURE_OPENAI_API_KEY": "azure:…",
    "ANTHROPIC_API_KEY": "anthropic:…",
    SERVER_KEY: "responses:<url>#model",
}
"""The variables of keys, and the model strings that they are for."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, with advice."""

    name: str
    state: CheckState
    found: str
    advice: str = ""


class CheckFailed(Exception):
    """A check found something wrong; the arguments are what is wrong, and what to do about it."""


def run_check(name: str, check: Callable[..., str], *arguments: Any) -> Check:
    """Return the result of a check, which returns what it found or raises `CheckFailed`."""
    try:
        return Check(name, "ok", check(*arguments))
    except CheckFailed as failure:
        return Check(name, "wrong", *failure.args)


def check_versions() -> Iterator[Check]:
    """Check the versions of Python, Kedge and its dependencies."""
    machine = f"{platform.system()} {platform.machine()}"
    yield Check("python", "ok", f"{platform.python_version()} on {machine}")
    yield Check("kedge", "ok", kedge.__version__)
    yield run_check("packages", _check_packages)
    yield _check_extras()


def _check_packages() -> str:
    """Check that the packages are installed that Kedge needs."""
    versions = {name: _package_version(name) for name in _list_required()}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if not version]
    if missing:
        raise CheckFailed(installed, f"Reinstall Kedge: {', '.join(missing)} missing.")
    return installed


def _check_extras() -> Check:
    """Show which extras are installed, and what the others are for."""
    installed: list[str] = []
    absent: list[str] = []
    for extra, (name, use) in EXTRAS.items():
        version = _package_version(name)
        if version:
            installed.append(f"{extra} ({name} {version})")
        else:
            absent.append(f"{extra} ({use})")
    advice = ""
    if absent:
        advice = f"pip install 'kedge-llm[…]' for: {', '.join(absent)}."
    return Check("extras", "ok", ", ".join(installed) or "none", advice)


def _list_required() -> list[str]:
    """Return the packages that Kedge needs without extras."""
    requirements = metadata.requires("kedge-llm") or ()
    return [re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line]


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_config() -> tuple[Config, list[Check]]:
    """Load the configuration and check it; an invalid file is ignored."""
    try:
        config = get_config()
    except CommandError as failure:
        path = config_path()
        check = Check("config", "wrong", failure.message, _advise_about_file(path))
        return Config(path, {}, os.environ), [check]
    return config, [_check_file(config), *_check_environment(config)]


def _advise_about_file(path: Path) -> str:
    """Return what to do about a configuration file that cannot be used."""
    if path.is_file():
        return f"Fix that line, or remove {path}."
    if read_variable(CONFIG_ENV):
        return f"Set {CONFIG_ENV} to the path of a regular file, or unset it."
    return f"Remove {path}, or replace it by a file."


def _check_file(config: Config) -> Check:
    """Check the file and, if it contains secrets, its permissions."""
    path = config.path
    if not path.exists():
        return Check("config", "ok", f"no file at {path}; defaults apply")
    values = config.file_values.items()
    secrets = [n for n, value in values if mask_value(SETTINGS[n], value) != format_value(value)]
    if secrets and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) and os.name == "posix":
        advice = f"It contains {', '.join(secrets)} and other users can read it: chmod 600 {path}"
        return Check("config", "note", str(path), advice)
    return Check("config", "ok", str(path))


def _check_environment(config: Config) -> Iterator[Check]:
    """Check the values of the environment variables."""
    for name in SETTINGS:
        try:
            config.find(name)
        except InvalidSetting as error:
            yield Check("environment", "wrong", str(error), "Correct it or unset it.")
    for name, similar in config.unknown_variables.items():
        advice = "'kedge config' lists the variables."
        if similar:
            advice = f"Did you mean {similar}?"
        yield Check("environment", "note", f"{name} is ignored: it is not a setting", advice)


def check_keys(environ: Mapping[str, str]) -> Iterator[Check]:
    """Show which keys are set, masked, and whether the environment enables or disables chaining."""
    from kedge.evidence.judge import CHAINING_VARIABLE, is_chaining_enabled

    keys = {name: read_variable(name, environ) for name in KEY_VARIABLES}
    for name, key in keys.items():
        if key:
            yield run_check(name, _check_key, key, KEY_VARIABLES[name])
    if not any(keys.values()):
        advice = f"To use other models than the built-in one, set one of {', '.join(keys)}."
        yield Check("keys", "note", "none set; the practice model needs none", advice)
    word = read_variable(CHAINING_VARIABLE, environ)[:100]
    if not word:
        return
    if is_chaining_enabled(environ):
        yield Check(CHAINING_VARIABLE, "ok", f"chaining is enabled: the value is {word!r}")
        return
    yield Check(
        CHAINING_VARIABLE,
        "note",
        f"chaining is disabled: the value is {word!r}",
        "Unset it or set it to 1 to enable chaining.",
    )


def _check_key(key: str, serves: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise CheckFailed("contains characters that are not allowed in a key", "Set it again.")
    return f"{mask(key)}, for {serves}"


def check_databases(config: Config) -> Iterator[Check]:
    """Check the folders, the server's database and the store."""
    address = store_url(config["store"], create=False)
    file = store_file(address)
    folders = {data_dir().absolute()}
    if file:
        folders.add(file.absolute().parent)
    for folder in sorted(folders):
        yield run_check("folder", check_folder, folder)
    db = config["serve.db"] or str(data_dir() / "server.db")
    yield run_check("server.db", check_server_database, db)
    store_check = run_check("store", check_store, address)
    yield store_check
    if store_check.state != "ok":
        return
    if file is None:
        yield from check_servers(address)
    elif file.exists():
        yield from check_servers(f"{address}?mode=ro")


def check_store(address: str) -> str:
    """Check the store."""
    from kedge.store.open import SCHEMA, read_schema_version

    file = store_file(address)
    if file:
        folder = file.absolute().parent
        if not folder.exists() and folder != data_dir().absolute():
            raise CheckFailed(
                f"{file} cannot be created: its folder does not exist",
                f"Create the folder {folder}, or use another file.",
            )
    return check_database(address, file, SCHEMA, read_schema_version)


def check_server_database(db: str) -> str:
    """Check the database of the server's responses."""
    from kedge.server.storage.database import SCHEMA, parse_sqlite_address, read_schema_version
    from kedge.store.database.postgres import is_postgresql

    if is_postgresql(db):
        return check_database(db, None, SCHEMA, read_schema_version)
    try:
        file = Path(parse_sqlite_address(db))
    except CannotServe as error:
        raise CheckFailed(f"{mask_url(db)} cannot be opened: {error}", CONNECT_ADVICE) from None
    return check_database(store_url(str(file)), file, SCHEMA, read_schema_version)


def check_database(
    address: str, file: Path | None, schema: "Schema", read_version: "Callable[[Tx], int]"
) -> str:
    """Check a database, and compare its schema with the schema of this version; ``file`` is an SQLite file."""
    from kedge.store.database.schema import WrongSchema

    if file is not None:
        file_state = check_sqlite(file)
        if not file.exists():
            return file_state
        address = f"{address}?mode=ro"
    name = str(file or mask_url(address))
    try:
        version = _read_store(address, read_version)
        schema.list_steps(version, name)
    except WrongSchema as error:
        raise CheckFailed(error.problem, f"{capitalize(error.advice)}.") from None
    except KedgeError as error:
        raise CheckFailed(f"{name} cannot be opened: {error}", CONNECT_ADVICE) from None
    if version < schema.version:
        step = f"{version} of {schema.version}; it is migrated when it is opened"
        return f"{name}, schema {step}"
    return f"{name}, schema {version}"


MAX_SERVERS = 20
PROOFS = {
    "table": "a provider that is known to remember",
    "identity": "a Kedge server, which remembers",
    "count": "its token counts show that it remembers",
    "audit": "it listed what it stored",
}
UNPROVEN = "everything is sent until its token counts or an audit show that it remembers"


def check_servers(address: str) -> Iterator[Check]:
    """Show the stored evidence about the memory of each server."""
    from kedge.evidence.server_evidence import KEY_SUFFIX, ServerEvidence
    from kedge.store.response_index import select_all_evidence

    try:
        rows = _read_store(address, lambda tx: select_all_evidence(tx, MAX_SERVERS))
    except KedgeError:  # reported by the check of the store
        return
    texts = dict[str, None]()  # evidence about streams is usually the same as about other answers
    for key, form in rows:
        if key.endswith(KEY_SUFFIX):
            continue
        scope, model, *_ = key.split(" ")
        evidence = ServerEvidence()
        evidence.restore(form)
        texts[f"{scope}, {model}: {_describe_evidence(evidence)}"] = None
    for text in texts:
        yield Check("server", "ok", sanitize_text(text))


def _describe_evidence(evidence: "ServerEvidence") -> str:
    """Return in one sentence whether a server is chained on, and why."""
    from kedge.planning.explain import MODE_REASONS

    doubt = evidence.find_doubt(time.time())
    if doubt:
        return f"not chained on, because {MODE_REASONS[doubt]}"
    text = UNPROVEN
    if evidence.proof:
        text = f"chained on: {PROOFS[evidence.proof]}"
    if evidence.max_depth:
        text += f"; at most {evidence.max_depth} responses deep"
    return text


def _read_store(address: str, read: "Callable[[Tx], T]") -> T:
    """Run queries on a store without upgrading it."""
    from kedge._internal.event_loops import run_sync
    from kedge.store.open import open_database

    async def run() -> T:
        database = open_database(address)
        try:
            return await database.read(read)
        finally:
            await database.aclose()

    return run_sync(run())


MIN_FREE_BYTES = 50_000_000


def check_folder(folder: Path) -> str:
    """Check that files can be created in a folder, or that the folder can be created."""
    ancestors = (folder, *folder.parents)
    existing = next((path for path in ancestors if path.exists()), folder)
    advice = "Free some space: conversations cannot be stored on a full disk."
    try:
        with TemporaryFile(dir=existing) as file:
            file.write(b" ")
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            advice = "Fix its permissions, or use another folder: --store, or XDG_DATA_HOME for all data."
        raise CheckFailed(f"{folder} cannot be written: {error.strerror}", advice) from None
    if free < MIN_FREE_BYTES:
        raise CheckFailed(f"{folder}, only {format_size(free)} free", advice)
    return f"{folder}, {format_size(free)} free"


def check_sqlite(path: Path) -> str:
    """Check an SQLite file, read-only."""
    if str(path) == ":memory:":
        return "in memory; nothing is stored"
    if not path.exists():
        return f"{path} does not exist yet; it is created on first use"
    try:
        try:
            integrity = _check_integrity(path)
        except sqlite3.OperationalError:  # no journal can be created in a read-only folder
            integrity = _check_integrity(path, "&immutable=1")
    except sqlite3.Error as error:
        advice = "Move it away to start with an empty one, or restore a backup."
        raise CheckFailed(f"{path} cannot be read: {error}", advice) from None
    if integrity != "ok":
        advice = "Restore a backup; 'sqlite3 FILE .recover' may save the rest."
        raise CheckFailed(f"{path} is damaged: {integrity}", advice)
    if not (_is_writable(path) and _is_writable(path.absolute().parent)):
        advice = "It can be read but not written: fix the permissions of the file and its folder."
        raise CheckFailed(f"{path} is read-only", advice)
    return str(path)


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _check_integrity(path: Path, options: str = "") -> str:
    """Return ``ok``, or what is wrong with a file."""
    address = f"{path.absolute().as_uri()}?mode=ro{options}"
    with closing(sqlite3.connect(address, uri=True)) as database:
        return database.execute("PRAGMA quick_check(1)").fetchone()[0]


CONNECT_ADVICE = "Check the address, the password and whether the database is running."


def check_providers(environ: Mapping[str, str], model: str, timeout: float) -> list[Check]:
    """Contact every provider whose key is set, and the configured server, at the same time."""
    models = {
        serves: variable
        for variable, serves in KEY_VARIABLES.items()
        if variable != SERVER_KEY and read_variable(variable, environ)
    }
    if model.partition(":")[0] in ("responses", "chat", "ollama"):
        models[model] = SERVER_KEY

    if not models:
        return [Check("online", "note", "no key is set and no server is configured")]

    async def check_all() -> list[Check]:
        checks = (check_provider(name, variable, timeout) for name, variable in models.items())
        return await asyncio.gather(*checks)

    return asyncio.run(check_all())


async def check_provider(model: str, key_variable: str, seconds: float) -> Check:
    """Request the list of models, the smallest request that requires a key, as an engine would send it."""
    from kedge.engines import AnthropicEngine, unwrap
    from kedge.providers import connect

    name = f"reach {model.partition(':')[0]}"
    url = "the server"
    advice = "Check the address, the network and the proxy, or increase --timeout."
    try:
        async with connect(model, timeout=seconds, max_retries=0) as engine:
            inner: Any = unwrap(engine)
            transport: Transport = inner.transport
            path = "/v1/models" if isinstance(inner, AnthropicEngine) else "/models"
            url = mask_url(transport.client.errors.base_url.rstrip("/") + path)
            started = time.perf_counter()
            reply = await transport.send(path, method="GET")
            milliseconds = (time.perf_counter() - started) * 1000
            await reply.aclose()
    except KedgeError as error:
        status = getattr(error, "status", None)
        if status:
            return _describe_status(name, url, key_variable, status)
        reason = mask_url(str(error.__cause__ or error))
        return Check(name, "wrong", f"{url} cannot be reached: {reason}", advice)
    return Check(name, "ok", f"{url} answered in {milliseconds:.0f} ms")


def _describe_status(name: str, url: str, key: str, status: int) -> Check:
    if status in (401, 403):
        return Check(
            name, "wrong", f"{url} rejects the key ({status})", f"Set {key} to a valid key."
        )
    if status in (404, 405):
        return Check(name, "ok", f"{url} answers, but has no list of models ({status})")
    return Check(name, "note", f"{url} answered {status}", "Try again later.")


STATE_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


@kedge_command("doctor", tolerant=True)
@click.option("--online", is_flag=True, help="Also contact the providers whose keys are set.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.1),
    help="Seconds to wait for a provider.  [default: 10; KEDGE_TIMEOUT]",
)
def command(online: bool, timeout: float | None) -> Result:
    """Check versions, keys, databases and the configuration.

    With --online, also check that the providers can be reached with the keys that are set.
    """
    config, config_checks = check_config()
    checks = [
        *check_versions(),
        *config_checks,
        *check_keys(os.environ),
        *check_databases(config),
    ]
    if online:
        checks += check_providers(os.environ, config["model"], timeout or config["timeout"])
    problems = sum(check.state == "wrong" for check in checks)
    return Result(
        {"ok": not problems, "checks": [asdict(check) for check in checks]},
        lambda: _print_checks(checks, problems, online=online),
        exit_code=int(problems > 0),
    )


def _print_checks(checks: list[Check], problems: int, *, online: bool) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, color = STATE_MARKS[check.state]
        indent = " " * (width + 4)
        text = wrap_text(f"{mark} {check.name:<{width}}  {check.found}", indent=indent)
        echo(f"{click.style(mark, fg=color)}{text.removeprefix(mark)}")
        if check.advice:
            echo(dim(wrap_text(f"{indent}{check.advice}", indent=indent)))
    echo()
    if problems:
        echo(f"{pluralize(problems, 'problem')} found.")
    else:
        echo("No problems found.")
    if not online:
        echo(dim("Providers were not contacted; use --online."))


@kedge_command("config", tolerant=True)
def config_command() -> Result:
    """Show the settings in effect and where each came from.

    An option overrides the environment, the environment overrides the file, the file overrides the default. A file
    with a mistake is ignored, and the mistake is reported.
    """
    try:
        config = get_config()
    except CommandError:
        describe_config(Config(config_path(), {}, os.environ)).show()
        raise
    return describe_config(config)


def describe_config(config: Config) -> Result:
    """Return the settings in effect."""
    settings = {
        value.setting.name: {
            "value": value.display_value if value.setting.secret else value.value,
            "source": value.source,
            "place": value.location,
            "variable": value.setting.env,
            "help": value.setting.help,
        }
        for value in config
    }
    value = {
        "file": str(config.path),
        "exists": config.path.exists(),
        "settings": settings,
        "unknown_variables": config.unknown_variables,
    }
    return Result(value, lambda: _print_config(config))


def _print_config(config: Config) -> None:
    file = f"{dim('file')}  {config.path}"
    if not config.path.exists():
        file += dim(" (does not exist; defaults apply)")
    echo(file)
    echo()
    print_table(
        ("setting", "value", "from", "variable"),
        [
            (
                value.setting.name,
                value.display_value or dim(f"({value.setting.default_text})"),
                config.path.name if value.source == "file" else value.source,
                dim(value.setting.env),
            )
            for value in config
        ],
    )
    if config.unknown_variables:
        echo()
        print_table(("ignored variable", "similar"), config.unknown_variables.items())


COMPLETE_VARIABLE = "_KEDGE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@kedge_command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> Result:
    """Print the completion script for a shell.

    To install it: kedge completion bash >> ~/.bashrc, kedge completion zsh >> ~/.zshrc, or
    kedge completion fish > ~/.config/fish/completions/kedge.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from kedge.cli import group

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.UsageError(f"completion for {shell} is not supported")
    # Without click's check of the local bash version.
    script = ShellComplete.source(completion_class(group, {}, "kedge", COMPLETE_VARIABLE))
    return Result({"shell": shell, "script": script}, script)
