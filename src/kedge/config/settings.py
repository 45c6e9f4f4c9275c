"""The table of settings: names, types, defaults and help texts.

Options, environment variables, keys of the file, ``kedge config`` and the documentation are derived from
it. ``serve.port`` is the key ``port`` in the section ``[serve]`` of the file, the option ``--port`` of
``kedge serve``, and ``KEDGE_SERVE_PORT`` in the environment.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kedge.errors import InvalidSetting

CHAINING_ENV = "ENABLE_RESPONSE_BOUNDARY_TRACKING"
_FALSE_VALUES = frozenset({"0", "false", "off", "no"})


def is_chaining_enabled() -> bool:
    """Return whether chaining is enabled; the environment can disable it."""
    return os.environ.get(CHAINING_ENV, "1").strip().lower() not in _FALSE_VALUES


MAX_NUMBER = 1e300
"""The maximum value of a numeric setting, which can still be converted to other units."""
SettingKind = Literal["text", "integer", "number", "switch"]
Scalar = str | int | float | bool

_BOOLEAN_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_KIND_NAMES: Mapping[SettingKind, str] = {
    "text": "a string",
    "integer": "an integer",
    "number": "a number",
    "switch": "true or false",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. For display, ``secret`` values and the password in a ``url`` are masked."""

    name: str
    kind: SettingKind
    default: Scalar
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: Literal["", "full", "url"] = ""
    env_override: str = ""
    default_label: str = ""
    """A description of the default, if the value itself does not show it."""

    @property
    def env(self) -> str:
        """The name of the environment variable."""
        return self.env_override or f"KEDGE_{self.name.upper().replace('.', '_')}"

    @property
    def section(self) -> str:
        """The section of the file, or an empty string."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The key in its section."""
        return self.name.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The command-line option."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def default_text(self) -> str:
        """The default for display."""
        return self.default_label or format_value(self.default)

    def parse(self, text: str, where: str) -> Scalar:
        """Parse a value from text; ``where`` begins the error message."""
        reading: Mapping[SettingKind, Callable[[str], Scalar]] = {
            "text": str,
            "integer": int,
            "number": float,
            "switch": lambda word: _BOOLEAN_WORDS[word.strip().lower()],
        }
        try:
            value = reading[self.kind](text)
        except (ValueError, KeyError):
            raise self._invalid(text, where) from None
        return self.check(value, where)

    def check(self, value: object, where: str) -> Scalar:
        """Return the value if it is valid, or raise ``InvalidSetting``."""
        match self.kind, value:
            case ("switch", bool()) | ("text", str()):
                pass
            case ("integer", int()) | ("number", int() | float()) if not isinstance(value, bool):
                self._check_range(value, where)
            case _:
                raise self._invalid(value, where)
        if self.choices and value not in ("", *self.choices):
            raise InvalidSetting(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        return value

    def _check_range(self, value: float, where: str) -> None:
        enough = self.minimum is None or value >= self.minimum
        finite = abs(value) <= MAX_NUMBER
        if not (
            enough and finite and (self.maximum is None or value <= self.maximum)
        ):  # this form also rejects NaN
            bounds = [f"at least {self.minimum:g}"] if self.minimum is not None else []
            bounds += [f"at most {self.maximum:g}"] if self.maximum is not None else []
            bounds += [] if finite else ["finite"]
            shown = f"{value:g}" if finite or isinstance(value, float) else "a number of that size"
            raise InvalidSetting(f"{where} must be {' and '.join(bounds)}, not {shown}")

    def _invalid(self, value: object, where: str) -> InvalidSetting:
        shown = "the given value" if self.secret else repr(value)
        return InvalidSetting(f"{where} must be {_KIND_NAMES[self.kind]}, not {shown}")


def format_value(value: Scalar) -> str:
    """Format a value as in the file, without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


_LOG_LEVELS = ("error", "warning", "info", "debug", "trace")

_TABLE = (
    Setting("model", "text", "practice", "The model that commands use: a model string."),
    Setting(
        "mode",
        "text",
        "",
        "How the server's memory is used.",
        choices=("chained", "stateless", "conversation"),
        default_label="chained",
    ),
    Setting("system", "text", "", "Instructions for the model.", default_label="none"),
    Setting(
        "store",
        "text",
        "",
        "Where conversations are stored: a file, or the address of a PostgreSQL database.",
        secret="url",
        default_label="kedge.db in the user's data folder",
    ),
    Setting(
        "log_level",
        "text",
        "",
        "The minimum level of log records that are shown.",
        choices=_LOG_LEVELS,
        default_label="none; info for serve",
    ),
    Setting("log_format", "text", "text", "The format of log records.", choices=("text", "json")),
    Setting("trace", "switch", False, "Create OpenTelemetry spans (extra otel)."),
    Setting(
        "timeout", "number", 10.0, "How long doctor waits for a server, in seconds.", minimum=0.1
    ),
    Setting("serve.host", "text", "127.0.0.1", "Address to listen on."),
    Setting(
        "serve.port", "integer", 8484, "Port to listen on; 0 for any.", minimum=0, maximum=65535
    ),
    Setting(
        "serve.db",
        "text",
        "",
        "Where responses are stored: a file, ':memory:', or postgresql://… for several servers.",
        default_label="server.db in the user's data folder",
    ),
    Setting(
        "serve.token",
        "text",
        "",
        "The token that clients must send. Required on any address but loopback.",
        secret="full",
        env_override="KEDGE_SERVER_TOKEN",
        default_label="none",
    ),
    Setting(
        "serve.retention_days",
        "number",
        30.0,
        "How many days responses are stored.",
        minimum=0.0001,
    ),
    Setting("serve.zero_data_retention", "switch", False, "Store nothing; chaining is rejected."),
    Setting(
        "serve.model",
        "text",
        "practice",
        "The model that answers: 'practice', 'script:FILE' for fixed answers, or a model string.",
    ),
    Setting(
        "serve.models",
        "text",
        "",
        "A TOML file of several models by name, instead of one (docs/backends.md).",
        default_label="none",
    ),
    Setting(
        "serve.pace", "number", 0.0, "Seconds between two words of a stream.", minimum=0, maximum=60
    ),
    Setting(
        "serve.unknown_parameters",
        "text",
        "",
        "What happens to unknown parameters of a request.",
        choices=("ignore", "reject"),
        default_label="reject for the practice model, else ignore",
    ),
    Setting("serve.page", "switch", True, "Show the page at '/', with the API behind it."),
    Setting("serve.keep_bodies", "switch", False, "Store the raw JSON of requests for the page."),
    Setting(
        "serve.max_body_mb",
        "number",
        32.0,
        "The maximum size of a request, in megabytes.",
        minimum=0.001,
    ),
    Setting(
        "proxy.upstream",
        "text",
        "https://api.openai.com/v1",
        "Base URL of the server that requests are forwarded to.",
        secret="url",
    ),
    Setting("proxy.host", "text", "127.0.0.1", "Address to listen on."),
    Setting(
        "proxy.port", "integer", 8485, "Port to listen on; 0 for any.", minimum=0, maximum=65535
    ),
    Setting(
        "proxy.db",
        "text",
        "",
        "Store with the digests of known responses: a file or an address; ':memory:' for none.",
        secret="url",
        default_label="proxy.db in the user's data folder",
    ),
    Setting(
        "proxy.token",
        "text",
        "",
        "What clients must send in the x-kedge-token header.",
        secret="full",
        default_label="none",
    ),
    Setting(
        "proxy.trust",
        "text",
        "earned",
        "Which upstreams are chained on: those known to remember, all, or none.",
        choices=("earned", "always", "never"),
    ),
    Setting("proxy.keep_bodies", "switch", False, "Store requests and responses for the page."),
    Setting(
        "proxy.allow_remote",
        "switch",
        False,
        "Listen on any address without a token, behind something that checks who connects.",
    ),
    Setting("mcp.host", "text", "127.0.0.1", "Address to listen on."),
    Setting("mcp.port", "integer", 8486, "Port to listen on; 0 for any.", minimum=0, maximum=65535),
    Setting(
        "mcp.token",
        "text",
        "",
        "What clients must send as a bearer token.",
        secret="full",
        default_label="none",
    ),
)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
"""Every setting by its name."""
