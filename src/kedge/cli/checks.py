"""What ``kedge doctor`` looks at on this machine: versions, configuration, keys."""

import os
import platform
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from kedge.cli.frame import Failure, config_of
from kedge.config import SETTINGS, Config, config_path, mask
from kedge.config.switch import SWITCH, chaining_enabled
from kedge.errors import InvalidSetting

State = Literal["ok", "note", "wrong"]

NEEDED = ("openai", "pydantic", "starlette", "uvicorn", "tiktoken", "rich", "prometheus-client")
EXTRAS = {
    "anthropic": ("anthropic", "Anthropic's models"),
    "psycopg": ("postgres", "conversations in PostgreSQL"),
    "cryptography": ("crypto", "encrypted states"),
    "opentelemetry-api": ("otel", "traces"),
    "dbos": ("dbos", "batches over many machines"),
}
KEYS = {
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
    state: State
    found: str
    advice: str = ""

    def report(self) -> dict[str, Any]:
        """The check as JSON."""
        return asdict(self)


def check_versions() -> Iterator[Check]:
    """Python, Kedge, and the packages it stands on."""
    machine = f"{platform.system()} {platform.machine()}"
    yield Check("python", "ok", f"{platform.python_version()} on {machine}")
    yield Check("kedge", "ok", metadata.version("kedge"))
    missing = [name for name in NEEDED if not _version(name)]
    found = ", ".join(f"{name} {_version(name)}" for name in NEEDED if _version(name))
    advice = f"Install Kedge again: {', '.join(missing)} missing." if missing else ""
    yield Check("packages", "wrong" if missing else "ok", found, advice)
    there = [
        f"{extra} ({name} {_version(name)})"
        for name, (extra, _) in EXTRAS.items()
        if _version(name)
    ]
    absent = [f"{extra} ({use})" for name, (extra, use) in EXTRAS.items() if not _version(name)]
    hint = f"pip install 'kedge[…]' for: {', '.join(absent)}." if absent else ""
    yield Check("extras", "ok", ", ".join(there) or "none", hint)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def look_at_config() -> tuple[Config, list[Check]]:
    """The configuration, and what is to be said of it; a broken file counts as none."""
    try:
        config = config_of()
    except Failure as failure:
        path = config_path()
        advice = f"Mend that line, or move {path} away."
        return Config(path, {}, os.environ), [Check("config", "wrong", failure.message, advice)]
    return config, [_file(config), *_environment(config)]


def _file(config: Config) -> Check:
    """The file: there, and not for everybody's eyes if it holds secrets."""
    path = config.path
    if not path.exists():
        return Check("config", "ok", f"no file at {path}; everything has its default")
    secrets = [name for name in config.from_file if SETTINGS[name].secret]
    if secrets and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH) and os.name == "posix":
        advice = f"It holds {', '.join(secrets)}, and others can read it: chmod 600 {path}"
        return Check("config", "note", str(path), advice)
    return Check("config", "ok", str(path))


def _environment(config: Config) -> Iterator[Check]:
    """The variables of the environment can be read as what they are for."""
    for name in SETTINGS:
        try:
            config.find(name)
        except InvalidSetting as error:
            yield Check("environment", "wrong", str(error), "Set it anew, or unset it.")


def check_keys(environ: Mapping[str, str]) -> Iterator[Check]:
    """Which keys are set, masked; and whether chaining is switched off."""
    found = False
    for variable, serves in KEYS.items():
        key = environ.get(variable, "")
        if not key.strip():
            continue
        found = True
        if key.strip().isascii() and key.strip().isprintable():
            yield Check(variable, "ok", f"{mask(key)}, for {serves}")
        else:
            yield Check(variable, "wrong", "holds characters that no key has", "Set it anew.")
    if not found:
        advice = f"Set {', '.join(KEYS)} for other models than the built-in one."
        yield Check("keys", "note", "none is set; the practice model needs none", advice)
    if not chaining_enabled():
        yield Check(SWITCH, "note", "chaining is switched off", "Unset it to chain again.")
