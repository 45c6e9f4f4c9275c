"""The one table of settings: names, types, defaults and words.

Flags, environment variables, keys of the file, ``kedge config`` and the documentation all come from it. A
name with a dot stands in a section of the file: ``serve.port`` is ``port`` under ``[serve]``, the flag
``--port`` of ``kedge serve``, and ``KEDGE_SERVE_PORT`` in the environment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kedge.errors import InvalidSetting

Kind = Literal["text", "integer", "number", "switch"]
Scalar = str | int | float | bool

_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_WANTED: Mapping[Kind, str] = {
    "text": "a text",
    "integer": "a whole number",
    "number": "a number",
    "switch": "true or false",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``secret`` values are shown masked, a ``url`` without its password."""

    name: str
    kind: Kind
    default: Scalar
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    secret: Literal["", "whole", "url"] = ""
    variable: str = ""
    shown: str = ""
    """What the default is in words, where the value does not tell."""

    @property
    def env(self) -> str:
        """The environment variable."""
        return self.variable or f"KEDGE_{self.name.upper().replace('.', '_')}"

    @property
    def section(self) -> str:
        """The section of the file, or nothing."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """The key in its section, and the name of the flag."""
        return self.name.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The flag of a command."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def default_words(self) -> str:
        """The default as a person reads it."""
        return self.shown or plain(self.default)

    def read(self, text: str, where: str) -> Scalar:
        """Take a value from text, as the environment and flags give it."""
        reading: Mapping[Kind, Callable[[str], Scalar]] = {
            "text": str,
            "integer": int,
            "number": float,
            "switch": lambda word: _WORDS[word.strip().lower()],
        }
        try:
            value = reading[self.kind](text)
        except (ValueError, KeyError):
            raise self._wrong(text, where) from None
        return self.check(value, where)

    def check(self, value: object, where: str) -> Scalar:
        """Give the value back if it may be, or say what it may be."""
        match self.kind, value:
            case ("switch", bool()) | ("text", str()):
                pass
            case ("integer", int()) | ("number", int() | float()) if not isinstance(value, bool):
                self._check_range(value, where)
            case _:
                raise self._wrong(value, where)
        if self.choices and value not in ("", *self.choices):
            raise InvalidSetting(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        return value

    def _check_range(self, value: float, where: str) -> None:
        enough = self.least is None or value >= self.least
        if not (enough and (self.most is None or value <= self.most)):  # so written for NaN
            bounds = [f"at least {self.least:g}"] if self.least is not None else []
            bounds += [f"at most {self.most:g}"] if self.most is not None else []
            raise InvalidSetting(
                f"{where} must be {' and '.join(bounds) or 'a number'}, not {value:g}"
            )

    def _wrong(self, value: object, where: str) -> InvalidSetting:
        shown = "what it is" if self.secret else repr(value)
        return InvalidSetting(f"{where} must be {_WANTED[self.kind]}, not {shown}")


def plain(value: Scalar) -> str:
    """A value as it is written in the file, without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


_LEVELS = ("error", "warning", "info", "debug", "trace")

_TABLE = (
    Setting("model", "text", "practice", "The model that commands talk with: a model string."),
    Setting(
        "mode",
        "text",
        "",
        "How the server's memory is used.",
        choices=("chained", "stateless", "conversation"),
        shown="chained",
    ),
    Setting("system", "text", "", "Instructions for the model.", shown="none"),
    Setting(
        "store",
        "text",
        "",
        "Where conversations are kept: a file, or the address of a PostgreSQL database.",
        secret="url",
        shown="kedge.db in the user's data folder",
    ),
    Setting(
        "log_level",
        "text",
        "",
        "From which level on log records are shown.",
        choices=_LEVELS,
        shown="none; info for serve",
    ),
    Setting("log_format", "text", "text", "How they are written.", choices=("text", "json")),
    Setting("trace", "switch", False, "Make OpenTelemetry spans (extra otel)."),
    Setting("timeout", "number", 10.0, "Seconds that doctor waits for a server.", least=0.1),
    Setting("serve.host", "text", "127.0.0.1", "Address to listen on."),
    Setting("serve.port", "integer", 8484, "Port to listen on; 0 for any.", least=0, most=65535),
    Setting(
        "serve.db",
        "text",
        "",
        "Where responses are kept; ':memory:' for nowhere.",
        shown="server.db in the user's data folder",
    ),
    Setting(
        "serve.token",
        "text",
        "",
        "What clients must send as their key. Needed on any address but loopback.",
        secret="whole",
        variable="KEDGE_SERVER_TOKEN",
        shown="none",
    ),
    Setting("serve.retention_days", "number", 30.0, "How long responses are kept.", least=0.0001),
    Setting("serve.zero_data_retention", "switch", False, "Keep nothing; chaining is refused."),
    Setting(
        "serve.model",
        "text",
        "practice",
        "What answers: 'practice', 'script:FILE' for fixed answers, or a model string.",
    ),
    Setting(
        "serve.models",
        "text",
        "",
        "A TOML file of several models by name, in the place of one (docs/backends.md).",
        shown="none",
    ),
    Setting(
        "serve.pace", "number", 0.0, "Seconds between two words of a stream.", least=0, most=60
    ),
    Setting("serve.page", "switch", True, "Show the page at '/', with the API behind it."),
    Setting("serve.keep_bodies", "switch", False, "Keep the raw JSON of the page's requests."),
    Setting("serve.max_body_mb", "number", 32.0, "The largest request, in megabytes.", least=0.001),
)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
"""Every setting by its name."""
