"""Shared parts of all commands: ``--json``, ``-v``, settings as options, and one-line errors.

A command is defined with ``@kedge_command()``. A ``KedgeError`` or an error of the operating system is printed as
one line with a hint, and the exit code is 1; a usage error has exit code 2, as in click. ``-v`` adds the
traceback and log records. With ``--json`` results and errors are JSON. Characters that the output cannot
encode are replaced.
"""

import codecs
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import IO, Any, TextIO, TypeVar, cast

import click

from kedge import errors
from kedge._internal.display import escape_json, sanitize_styled, sanitize_text
from kedge.cli.commands import choose_color
from kedge.config import Config, SettingValue, load_config
from kedge.config.settings import SETTINGS, Setting
from kedge.errors import KedgeError

HINTS: dict[type[BaseException], str] = {
    errors.NotAuthorized: "'kedge doctor' shows which keys are set.",
    errors.UnconfirmedReference: "",
    errors.CannotConnect: "'kedge doctor' shows which keys are set and what is missing.",
    errors.RateLimited: "Wait and try again.",
    errors.Unreachable: "Is the server running? 'kedge doctor --online' checks.",
    errors.ServerFailed: "Try again later; the conversation is unchanged.",
    errors.StreamCut: "Try again later; the conversation is unchanged.",
    errors.HeadConflict: "Another process uses this conversation: try again, or continue from the stored node "
    "with 'kedge fork --at'.",
    errors.StoreFull: "Free some space, or use another disk.",
    errors.StoreReadOnly: "Check the permissions of the file and its folder, or use another file.",
    errors.CannotOpenStore: "Use another file or database; 'kedge doctor' checks the configured ones.",
}
SETTINGS_HINT = "'kedge doctor' checks all settings."
ENCODING_HINT = "Is the text UTF-8? 'iconv -f latin1 -t utf-8' converts it."
_FIRST_BYTES_HINTS: dict[bytes, str] = {
    b"\xff\xfe": "The text is UTF-16; 'iconv -f utf-16 -t utf-8' converts it.",
    b"\xfe\xff": "The text is UTF-16; 'iconv -f utf-16 -t utf-8' converts it.",
    b"\x1f\x8b": "The file is compressed; 'gunzip' decompresses it.",
}
_SYSTEM_HINTS: dict[int, str] = {
    errno.ENOSPC: "Free some space, or use another disk.",
    errno.EDQUOT: "Free some space, or use another disk.",
    errno.ENOENT: "Check the path; the folder must exist.",
    errno.EISDIR: "Use the path of a file.",
}
_PERMISSION_HINT = (
    "Check the permissions, or use another folder; 'kedge doctor' shows which folders are used."
)


MAX_SHOWN_PROBLEMS = 3


def find_hint(error: BaseException) -> str:
    """Return a line of advice for an error, or an empty string."""
    if isinstance(error, UnicodeDecodeError):
        return _FIRST_BYTES_HINTS.get(error.object[:2], ENCODING_HINT)
    if isinstance(error, UnicodeError) or "lone surrogate" in str(error):
        return ENCODING_HINT
    if str(error).startswith("the MCP server "):
        return "Check the command or the URL of --mcp."
    if isinstance(error, errors.OutputInvalid):
        return "; ".join(error.problems[:MAX_SHOWN_PROBLEMS])
    if isinstance(error, OSError):
        return _SYSTEM_HINTS.get(error.errno or 0, _PERMISSION_HINT)
    for kind in type(error).__mro__:
        if kind in HINTS:
            return HINTS[kind]
    return ""


COLUMN_GAP = "  "
MIN_TERMINAL_WIDTH = 20
MIN_LAST_COLUMN = 8
"""The width below which the last column of a table is not truncated."""


def echo(text: str = "", *, err: bool = False, nl: bool = True, color: bool | None = None) -> None:
    """Print a text without control characters other than styles, which are removed outside of a terminal.

    Args:
        text: The text. Untrusted parts are sanitized before they are styled.
        err: Whether to print it on standard error.
        nl: Whether a line break follows.
        color: Whether to keep styles, instead of the choice by the output.
    """
    # The stream itself: without it, click writes UTF-8 where the output is ASCII.
    click.echo(sanitize_styled(text), file=_get_stream(err), nl=nl, color=color)


def _get_stream(err: bool) -> TextIO:
    return sys.stderr if err else sys.stdout


def wrap_text(text: str, *, indent: str = "", err: bool = False) -> str:
    """Break lines between words at the width of the terminal; without a terminal return the text.

    Args:
        text: The text, without styles.
        indent: The prefix of the second and later parts of a line.
        err: Whether it is printed on standard error.
    """
    width = _terminal_width(_get_stream(err))
    if not width:
        return text
    wrapper = TextWrapper(
        max(width, MIN_TERMINAL_WIDTH),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    lines: list[str] = []
    for line in text.split("\n"):
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def echo_json(value: Any) -> None:
    """Print a value as JSON: indented on a terminal, else on one line."""
    indent = 2 if sys.stdout.isatty() else None
    echo(format_json(value, indent=indent, default=_encode_other))


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command: printed as JSON with ``--json``, else as a text or by a function."""

    value: Any
    text: str | Callable[[], object]
    exit_code: int = 0

    def show(self) -> None:
        """Print the result, and end the command if its exit code is not 0."""
        if is_json():
            echo_json(self.value)
        elif isinstance(self.text, str):
            echo(self.text)
        else:
            self.text()
        if self.exit_code:
            raise click.exceptions.Exit(self.exit_code)


def get_setting(name: str) -> SettingValue:
    """Return the value of a setting that is an option of the running command."""
    return click.get_current_context().meta[SETTINGS_KEY][name]


def _encode_other(value: object) -> Any:
    """Return a value that ``json`` cannot encode as a dict if it is a mapping, or else as text."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    return str(value)


def format_json(value: Any, *, to_stderr: bool = False, **options: Any) -> str:
    """Format a value as JSON; control characters, and others that the output cannot encode, are escaped."""
    is_utf8 = codecs.lookup(_get_stream(to_stderr).encoding).name == "utf-8"
    return escape_json(json.dumps(value, ensure_ascii=not is_utf8, **options))


_ASCII_FORMS = {
    "…": "...", "\N{EN DASH}": "-", "—": "-", "→": ">", "·": ".", "✓": "+", "✗": "x", "●": "*", "◇": "o",
    "│": "|", "├": "+", "─": "-", "┘": "'", "╯": "'", "└": "`", "┴": "+", "█": "#", "µ": "u",
    "▁": ".", "▂": ":", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%",
    "“": '"', "”": '"', "\u2018": "'", "\u2019": "'",
}  # fmt: skip
"""The replacements of characters that the output cannot encode; others become a question mark."""


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_ASCII_FORMS.get(char, "?") for char in text), error.end


codecs.register_error("kedge", _replace_unencodable)


def _open_missing_streams() -> None:
    """Replace standard streams that the caller closed (as with ``>&-``) by ``/dev/null``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, null)


def make_output_tolerant() -> None:
    """Replace characters that standard output or standard error cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="kedge")


def dim(text: str) -> str:
    """Style secondary text."""
    return click.style(text, dim=True)


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    width: int = 0,
    right: Container[str] = (),
) -> None:
    """Print columns; on a terminal the last one is truncated to the width.

    Args:
        headers: The names of the columns.
        rows: The cells, which may be styled.
        width: The width of the terminal, instead of the actual one.
        right: The names of the columns that are aligned on the right; no cell of these is styled.
    """
    styled_rows = [list(headers), *([_format_cell(cell) for cell in row] for row in rows)]
    plain_rows = [[click.unstyle(cell) for cell in row] for row in styled_rows]
    widths = [max(map(len, column)) for column in zip(*plain_rows, strict=True)]
    room = (width or _terminal_width()) - sum(widths[:-1]) - len(COLUMN_GAP) * (len(widths) - 1)

    for number, (cells, texts) in enumerate(zip(styled_rows, plain_rows, strict=True)):
        if number and MIN_LAST_COLUMN <= room < len(texts[-1]):
            texts[-1] = f"{texts[-1][: room - 1]}…"
            cells[-1] = texts[-1]
        padded: list[str] = []
        for name, cell, text, size in zip(headers, cells, texts, widths, strict=True):
            gap = " " * (size - len(text))
            padded.append(gap + cell if name in right else cell + gap)
        line = COLUMN_GAP.join(padded).rstrip()
        if number == 0:
            line = dim(line)
        echo(line)


def _format_cell(value: object) -> str:
    """Return a cell in one line, as the output can encode it, so that its width is known."""
    if value is None:
        return ""
    text = " ".join(str(value).split())
    encoding = sys.stdout.encoding or "utf-8"  # a buffer has none
    return text.encode(encoding, "kedge").decode(encoding)


def _terminal_width(stream: TextIO | None = None) -> int:
    """Return the width of the terminal, or 0 if there is none."""
    if not (stream or sys.stdout).isatty():
        return 0
    return get_terminal_size().columns


F = TypeVar("F", bound=Callable[..., Any])

VERBOSE_KEY = "kedge.verbose"
JSON_KEY = "kedge.json"
SETTINGS_KEY = "kedge.settings"
"""The member of ``Context.meta`` with the values of the settings that are options of the command."""
ADVICE_KEY = "kedge.advice"
"""The member of ``Context.meta`` with advice that follows the hint of any error of the command."""
_LOG_LEVELS = ("", "warning", "info", "debug", "trace")


class CommandError(click.ClickException):
    """An error that the command line prints in one line."""

    exit_code = 1

    def __init__(
        self, error: BaseException, *, as_json: bool, verbose: bool, advice: str = ""
    ) -> None:
        super().__init__(format_error(error))
        self.error = error
        self.hint = " ".join(filter(None, (find_hint(error), advice)))
        self.as_json = as_json
        self.verbose = verbose

    def show(self, file: IO[Any] | None = None) -> None:
        """Print one line and a hint, with ``-v`` also the traceback."""
        if self.verbose:
            echo("".join(traceback.format_exception(self.error)), err=True, nl=False)
        if self.as_json:
            report = describe_error(self.error, self.message, self.hint)
            echo(format_json(report, to_stderr=True), err=True)
            return
        echo_error(self.message, self.hint)


def describe_error(error: BaseException, message: str, hint: str) -> dict[str, str]:
    """Return the JSON form of an error."""
    return {"error": message, "kind": type(error).__name__, "hint": hint}


def echo_note(text: str) -> None:
    """Print a note for people on standard error; with ``--json`` there are none."""
    if not is_json():
        echo(wrap_text(f"Note: {text}", err=True), err=True)


def echo_error(message: str, hint: str) -> None:
    """Print an error and a hint on standard error, also when there is no context of a command any more."""
    text = wrap_text(f"Error: {sanitize_text(message)}", err=True).removeprefix("Error")
    lines = [f"{click.style('Error', fg='red')}{text}"]
    if hint:
        lines.append(click.style(wrap_text(f"Hint: {sanitize_text(hint)}", err=True), dim=True))
    echo("\n".join(lines), err=True, color=choose_color())


def format_error(error: BaseException) -> str:
    """Return the message of an error in one line."""
    if isinstance(error.__cause__, UnicodeEncodeError):
        error = error.__cause__  # it has the text, usually an argument
    if isinstance(error, KedgeError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    if type(error).__module__ == "sqlite3":
        return f"SQLite reports: {error}; 'kedge doctor' checks the databases"
    if isinstance(error, UnicodeDecodeError):
        return f"the text is not {error.encoding.upper()}: {error.reason} at byte {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return f"the text {error.object!r} is not {error.encoding.upper()}: {error.reason}"
    return f"internal error: {type(error).__name__}; run the command again with -v and report it"


class Command(click.Command):
    """A command whose errors are reported in one line.

    ``log_level`` is the minimum level of log records shown by default. A ``tolerant`` command also runs
    with an invalid configuration.
    """

    log_level: str = ""
    tolerant: bool = False

    def invoke(self, ctx: click.Context) -> None:
        """Run the command and print its result."""
        _open_missing_streams()
        make_output_tolerant()
        try:
            self._report_variables(ctx, is_logged=self._configure_logging(ctx))
            result = super().invoke(ctx)
            if isinstance(result, Result):
                result.show()
            sys.stdout.flush()  # a full disk is reported here, not by the interpreter
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            discard_output()  # the reader of our output has closed the pipe
            raise click.exceptions.Exit(1) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
                discard_output()
            raise _command_error(ctx, error) from error

    def _configure_logging(self, ctx: click.Context) -> bool:
        """Show log records as ``-v``, the settings or the command's default require; return whether any are."""
        verbosity: int = ctx.meta.get(VERBOSE_KEY, 0)
        level: Any = _LOG_LEVELS[min(verbosity, len(_LOG_LEVELS) - 1)]
        form: Any = "text"
        try:
            form = find_setting(ctx, "log_format").value
            level = level or find_setting(ctx, "log_level").value or self.log_level
        except CommandError:
            if not self.tolerant:
                raise
        if level:
            from kedge.observe import log_to_stderr

            log_to_stderr(level, form)
        return bool(level)

    def _report_variables(self, ctx: click.Context, *, is_logged: bool) -> None:
        """Report environment variables that are ignored and similar to the variable of a setting.

        Without log records they are notes; commands that are tolerant list them.
        """
        if self.tolerant:
            return
        for name, similar in get_config(ctx).unknown_variables.items():
            if not similar:
                continue
            text = f"{name} is ignored: it is not a setting; did you mean {similar}?"
            if not is_logged:
                echo_note(text)
                continue
            from kedge.observe import get_logger

            get_logger(__name__).warning(text)


def discard_output() -> None:
    """Redirect standard output, so that the interpreter does not flush into a closed one."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[JSON_KEY] = value
    return value


def _set_verbose(ctx: click.Context, _: click.Parameter, value: int) -> int:
    ctx.meta[VERBOSE_KEY] = max(value, ctx.meta.get(VERBOSE_KEY, 0))
    return value


_COMMON_OPTIONS = (
    click.Option(
        ["--json"],
        is_flag=True,
        callback=_set_json,
        is_eager=True,
        expose_value=False,
        help="Print JSON.",
    ),
    click.Option(
        ["-v", "--verbose"],
        count=True,
        callback=_set_verbose,
        is_eager=True,
        expose_value=False,
        help="Show tracebacks and warnings; repeat for more.",
    ),
)
"""The options of every command, which come last."""


def kedge_command(
    name: str | None = None, *, log_level: str = "", tolerant: bool = False, **attributes: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Return a decorator that makes a command of a function, which may return a `Result` to print."""

    def wrap(function: Callable[..., Any]) -> Command:
        command = click.command(name, cls=Command, **attributes)(function)
        command.log_level = log_level
        command.tolerant = tolerant
        command.params += _COMMON_OPTIONS
        return command

    return wrap


def is_json(ctx: click.Context | None = None) -> bool:
    """Return whether the command has ``--json``."""
    ctx = ctx or click.get_current_context(silent=True)
    return bool(ctx and ctx.meta.get(JSON_KEY))


def setting_option(name: str, **attributes: Any) -> Callable[[F], F]:
    """Return an option for a setting, with the environment, the file and the default as fallbacks."""
    setting = SETTINGS[name]

    def find(ctx: click.Context, _: click.Parameter, flag: Any) -> Any:
        setting_value = find_setting(ctx, name, flag)
        ctx.meta.setdefault(SETTINGS_KEY, {})[name] = setting_value
        return setting_value.value

    sources = setting.env
    if setting.default_text:
        sources = f"default: {setting.default_text}; {sources}"
    text = f"{attributes.pop('help', setting.help)}  [{sources}]"
    flag_names = setting.flag
    if setting.type is bool:
        flag_names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
    return click.option(
        flag_names,
        setting.key,
        default=None,
        type=_param_type(setting),
        callback=find,
        help=text,
        **attributes,
    )


def section_options(section: str, **metavars: str) -> Callable[[F], F]:
    """Return the options of all settings of a section, with the names of some values in the help."""

    def add(function: F) -> F:
        for setting in reversed(tuple(SETTINGS.values())):
            if setting.section == section:
                metavar = metavars.get(setting.key)
                function = setting_option(setting.name, metavar=metavar)(function)
        return function

    return add


def default_option(name: str, default: Any, kind: Any, text: str, *names: str) -> Callable[[F], F]:
    """Return an option whose default is shown in its help; ``names`` are its other names."""
    return click.option(name, *names, default=default, show_default=True, type=kind, help=text)


def repeated_option(name: str, key: str, metavar: str, text: str, *names: str) -> Callable[[F], F]:
    """Return an option that can be repeated; ``names`` are its other names."""
    return click.option(
        name, *names, key, multiple=True, metavar=metavar, help=f"{text} Repeatable."
    )


def _param_type(setting: Setting) -> Any:
    if setting.choices:
        return click.Choice(setting.choices, case_sensitive=False)
    if setting.type is int:
        return click.IntRange(_to_int(setting.minimum), _to_int(setting.maximum))
    if setting.type is float:
        return click.FloatRange(setting.minimum, setting.maximum)
    return setting.type


def _to_int(bound: float | None) -> int | None:
    if bound is None:
        return None
    return int(bound)


def get_config(ctx: click.Context | None = None) -> Config:
    """Return the configuration of this call, read once."""
    ctx = ctx or click.get_current_context()
    meta = ctx.meta
    if "kedge.config" not in meta:
        try:
            meta["kedge.config"] = load_config()
        except KedgeError as error:
            raise _command_error(ctx, error, SETTINGS_HINT) from error
    return meta["kedge.config"]


def find_setting(ctx: click.Context, name: str, flag: Any = None) -> SettingValue:
    """Return the value of a setting for this call; ``flag`` is the value of the option, if it was given."""
    setting = SETTINGS[name]
    config = get_config(ctx)
    try:
        if flag is None:
            return config.find(name)
        return config.find(name, setting.check(flag, setting.flag))
    except KedgeError as error:
        raise _command_error(ctx, error, SETTINGS_HINT) from error


def _command_error(ctx: click.Context, error: Exception, advice: str = "") -> CommandError:
    return CommandError(
        error,
        as_json=is_json(ctx),
        verbose=bool(ctx.meta.get(VERBOSE_KEY)),
        advice=advice or ctx.meta.get(ADVICE_KEY, ""),
    )
