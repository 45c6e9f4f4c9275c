"""What every command shares: ``--json``, ``-v``, settings as options, and errors of one line.

A command is made with ``@command()``. An error of ours becomes one line and a hint and exit code 1, a
wrong use exit code 2 (click's own); ``-v`` adds the traceback, and log records from a level on. With
``--json`` results and errors are JSON.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click

from kedge.cli.hints import hint_for
from kedge.config import SETTINGS, Config, Setting, load_config
from kedge.errors import KedgeError

F = TypeVar("F", bound=Callable[..., Any])

VERBOSE = "kedge.verbose"
SOURCES = "kedge.flags"
_LEVELS = ("", "warning", "info", "debug", "trace")


class Failure(click.ClickException):
    """An error as the command line tells it."""

    exit_code = 1

    def __init__(self, error: BaseException, *, as_json: bool, verbose: bool) -> None:
        super().__init__(_words(error))
        self.error = error
        self.hint = hint_for(error)
        self.as_json, self.verbose = as_json, verbose

    def show(self, file: IO[Any] | None = None) -> None:
        """One line, a hint, and the traceback for those who asked."""
        if self.verbose:
            click.echo("".join(traceback.format_exception(self.error)), err=True, nl=False)
        if self.as_json:
            told = {"error": self.message, "kind": type(self.error).__name__, "hint": self.hint}
            click.echo(json.dumps(told, ensure_ascii=False), err=True)
            return
        click.echo(f"{click.style('Error', fg='red')}: {self.message}", err=True)
        if self.hint:
            click.echo(click.style(f"Hint: {self.hint}", dim=True), err=True)


def _words(error: BaseException) -> str:
    if isinstance(error, KedgeError):
        return " ".join(str(error).split())
    return f"a mistake in kedge itself: {type(error).__name__}; run it again with -v and report it"


class Command(click.Command):
    """A command whose failures are told in one line.

    ``log_level`` is from which level on it shows log records when nobody asked otherwise. One that is
    ``tolerant`` runs with a broken configuration, too.
    """

    log_level: str = ""
    tolerant: bool = False

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            self._start_logs(ctx)
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Whoever read our output has enough; let the interpreter find no pipe to flush into.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(1) from None
        except Exception as error:
            raise _failure(ctx, error) from error

    def _start_logs(self, ctx: click.Context) -> None:
        """Show log records, to those who asked for them, or as the command usually does."""
        asked: int = ctx.meta.get(VERBOSE, 0)
        level, form = _LEVELS[min(asked, len(_LEVELS) - 1)], "text"
        try:
            config = config_of(ctx)
            level, form = level or config["log_level"] or self.log_level, config["log_format"]
        except Failure:
            if not self.tolerant:
                raise
        if level:
            from kedge.observe import log_to_stderr

            log_to_stderr(level, form)


def command(
    name: str | None = None, *, log_level: str = "", tolerant: bool = False, **attributes: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function; it takes ``as_json`` beside its own parameters."""

    def wrap(function: Callable[..., Any]) -> Command:
        function = click.option(
            "-v",
            "--verbose",
            count=True,
            is_eager=True,
            expose_value=False,
            callback=_verbose,
            help="Show more.",
        )(function)
        function = click.option(
            "--json", "as_json", is_flag=True, is_eager=True, help="Answer in JSON, for scripts."
        )(function)
        made = click.command(name, cls=Command, **attributes)(function)
        made.log_level, made.tolerant = log_level, tolerant
        made.params.sort(key=lambda each: each.name in ("as_json", "verbose"))  # these come last
        return made

    return wrap


def _verbose(ctx: click.Context, _: click.Parameter, value: int) -> int:
    ctx.meta[VERBOSE] = max(value, ctx.meta.get(VERBOSE, 0))
    return value


def setting(name: str, parameter: str = "", **attributes: Any) -> Callable[[F], F]:
    """An option for a setting of the table: a flag, else the environment, the file, the default."""
    known = SETTINGS[name]

    def find(ctx: click.Context, _: click.Parameter, given: Any) -> Any:
        config = config_of(ctx)
        try:
            found = config.find(name, None if given is None else known.check(given, known.flag))
        except KedgeError as error:
            raise _failure(ctx, error) from error
        ctx.meta.setdefault(SOURCES, {})[name] = found.source
        return found.value

    default = f"default: {known.default_words}; " if known.default_words else ""
    told = f"{attributes.pop('help', known.help)}  [{default}{known.env}]"
    flags = (f"{known.flag}/--no-{known.flag[2:]}",) if known.kind == "switch" else (known.flag,)
    return click.option(
        *flags,
        parameter or known.key,
        default=None,
        type=_type(known),
        callback=find,
        help=told,
        **attributes,
    )


def _type(known: Setting) -> Any:
    if known.choices:
        return click.Choice(known.choices)
    match known.kind:
        case "integer":
            return click.IntRange(_whole(known.least), _whole(known.most))
        case "number":
            return click.FloatRange(known.least, known.most)
        case "switch":
            return bool
        case "text":
            return str


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def config_of(ctx: click.Context | None = None) -> Config:
    """The configuration of this call, read once."""
    ctx = ctx or click.get_current_context()
    meta = ctx.meta
    if "kedge.config" not in meta:
        try:
            meta["kedge.config"] = load_config()
        except KedgeError as error:
            raise _failure(ctx, error) from error
    return meta["kedge.config"]


def _failure(ctx: click.Context, error: Exception) -> Failure:
    as_json = bool(ctx.params.get("as_json"))
    return Failure(error, as_json=as_json, verbose=bool(ctx.meta.get(VERBOSE)))
