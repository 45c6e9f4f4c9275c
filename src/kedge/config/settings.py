"""The table of settings: names, types, defaults and help texts.

Options, environment variables, keys of the file, ``kedge config`` and the documentation are derived from
it. ``serve.port`` is the key ``port`` in the section ``[serve]`` of the file, the option ``--port`` of
``kedge serve``, and ``KEDGE_SERVE_PORT`` in the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kedge._internal.arguments import check_choice, parse_switch
from kedge.errors import InvalidSetting

OTHER_VARIABLES = ("KEDGE_API_KEY", "KEDGE_CONFIG", "KEDGE_MAX_RESPONSE_BYTES", "KEDGE_PRICES")
"""The environment variables of Kedge that are not settings."""
MAX_NUMBER = 1e300
"""The maximum value of a numeric setting, which can still be converted to other units."""
Scalar = str | int | float | bool

_TYPES: Mapping[type[Scalar], tuple[tuple[type[Scalar], ...], str]] = {
    str: ((str,), "a string"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}
"""The types of values that a setting of each type accepts, and their description."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. For display, ``secret`` values and the password in a ``url`` are masked."""

    name: str
    default: Scalar
    """Its type is the type of the setting."""
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
        return self.default_label or format_value(self.default) or "none"

    @property
    def type(self) -> type[Scalar]:
        """The type of its values: ``str``, ``int``, ``float`` or ``bool``."""
        return type(self.default)

    def parse(self, text: str, location: str) -> Scalar:
        """Parse a value from text; ``location`` begins the error message."""
        if self.type is bool:
            is_on = parse_switch(text)
            if is_on is None:
                raise self._invalid(text, location)
            return is_on
        try:
            value = self.type(text)
        except ValueError:
            raise self._invalid(text, location) from None
        return self.check(value, location)

    def check(self, value: object, location: str) -> Scalar:
        """Return the value if it is valid, or raise ``InvalidSetting``."""
        if not isinstance(value, Scalar) or type(value) not in _TYPES[self.type][0]:
            raise self._invalid(value, location)
        if isinstance(value, int | float):
            self._check_range(value, location)
        if self.choices and value:
            value = str(value).lower()
            check_choice(location, value, self.choices)
        return value

    def _check_range(self, value: float, location: str) -> None:
        is_enough = self.minimum is None or value >= self.minimum
        is_small = self.maximum is None or value <= self.maximum
        is_finite = abs(value) <= MAX_NUMBER
        if is_enough and is_small and is_finite:  # NaN is none of these
            return
        bounds: list[str] = []
        if self.minimum is not None:
            bounds.append(f"at least {self.minimum:g}")
        if self.maximum is not None:
            bounds.append(f"at most {self.maximum:g}")
        if not is_finite:
            bounds.append("finite")
        shown = "a number of that size"
        if is_finite or isinstance(value, float):
            shown = f"{value:g}"
        raise InvalidSetting(f"{location} must be {' and '.join(bounds)}, not {shown}")

    def _invalid(self, value: object, location: str) -> InvalidSetting:
        shown = repr(value)
        if self.secret == "full" or (self.secret and not isinstance(value, int | float)):
            shown = "the given value"
        return InvalidSetting(f"{location} must be {_TYPES[self.type][1]}, not {shown}")


def format_value(value: Scalar) -> str:
    """Format a value as in the file, without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


_LOG_LEVELS = ("error", "warning", "info", "debug", "trace")

_TABLE = (
    Setting("model", "practice", "The model that commands use: a model string.", secret="url"),
    Setting(
        "mode",
        "",
        "How the server's memory is used.",
        choices=("chained", "stateless", "conversation"),
        default_label="chained",
    ),
    Setting("system", "", "Instructions for the model."),
    Setting(
        "store",
        "",
        "Where conversations are stored: a file, or the address of a PostgreSQL database.",
        secret="url",
        default_label="kedge.db in the user's data folder",
    ),
    Setting(
        "log_level",
        "",
        "The minimum level of log records that are shown.",
        choices=_LOG_LEVELS,
        default_label="none; info for serve",
    ),
    Setting("log_format", "text", "The format of log records.", choices=("text", "json")),
    Setting("trace", False, "Create OpenTelemetry spans (extra otel)."),
    Setting("timeout", 10.0, "How long doctor waits for a server, in seconds.", minimum=0.1),
    Setting("serve.host", "127.0.0.1", "Address to listen on."),
    Setting("serve.port", 8484, "Port to listen on; 0 for any.", minimum=0, maximum=65535),
    Setting(
        "serve.db",
        "",
        "Where responses are stored: a file, ':memory:', or postgresql://… for several servers.",
        secret="url",
        default_label="server.db in the user's data folder",
    ),
    Setting(
        "serve.token",
        "",
        "The token that clients must send. Required on any address but loopback.",
        secret="full",
        env_override="KEDGE_SERVER_TOKEN",
    ),
    Setting("serve.retention_days", 30.0, "How many days responses are stored.", minimum=0.0001),
    Setting("serve.zero_data_retention", False, "Store nothing; chaining is rejected."),
    Setting(
        "serve.model",
        "practice",
        "The model that answers: 'practice', 'script:FILE' for fixed answers, or a model string.",
        secret="url",
    ),
    Setting(
        "serve.models",
        "",
        "A TOML file of several models by name, instead of one (docs/engine-models.md).",
    ),
    Setting("serve.pace", 0.0, "Seconds between two words of a stream.", minimum=0, maximum=60),
    Setting(
        "serve.unknown_parameters",
        "",
        "What happens to unknown parameters of a request.",
        choices=("ignore", "reject"),
        default_label="reject for the practice model, else ignore",
    ),
    Setting("serve.page", True, "Show the page at '/', with the API behind it."),
    Setting("serve.keep_bodies", False, "Store the raw JSON of requests for the page."),
    Setting(
        "serve.max_body_mb", 32.0, "The maximum size of a request, in megabytes.", minimum=0.001
    ),
    Setting(
        "serve.trusted_proxies",
        "",
        "Addresses of reverse proxies whose X-Forwarded-For header names the client.",
    ),
    Setting(
        "proxy.upstream",
        "https://api.openai.com/v1",
        "Base URL of the server that requests are forwarded to.",
        secret="url",
    ),
    Setting("proxy.host", "127.0.0.1", "Address to listen on."),
    Setting("proxy.port", 8485, "Port to listen on; 0 for any.", minimum=0, maximum=65535),
    Setting(
        "proxy.db",
        "",
        "Store with the digests of known responses: a file or an address; ':memory:' for none.",
        secret="url",
        default_label="proxy.db in the user's data folder",
    ),
    Setting(
        "proxy.token", "", "What clients must send in the x-kedge-token header.", secret="full"
    ),
    Setting(
        "proxy.trust",
        "earned",
        "Which upstreams are chained on: those known to remember, all, or none.",
        choices=("earned", "always", "never"),
    ),
    Setting("proxy.keep_bodies", False, "Store requests and responses for the page."),
    Setting(
        "proxy.allow_remote",
        False,
        "Listen on any address without a token, behind something that checks who connects.",
    ),
    Setting("mcp.host", "127.0.0.1", "Address to listen on."),
    Setting("mcp.port", 8486, "Port to listen on; 0 for any.", minimum=0, maximum=65535),
    Setting("mcp.token", "", "What clients must send as a bearer token.", secret="full"),
)
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
"""Every setting by its name."""
