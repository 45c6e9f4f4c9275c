"""``kedge auth``: the named tokens of a store, with which users may use a server and its page.

The scopes of a token are what it gives access to, as in OAuth. They are unrelated to the scope of a response.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from kedge._internal.display import format_age, sanitize_text
from kedge.cli.base import Result, echo, kedge_command, print_table
from kedge.cli.store_options import run_with_store, store_option, with_store
from kedge.store import AccessToken, Store, TokenRegistry
from kedge.store.token_registry import DEFAULT_SCOPES, SCOPES

NO_LIMIT = "none"


@click.group("auth")
def command() -> None:
    """Manage the named tokens with which users may use 'kedge serve' and its page.

    Each user sees only their own conversations and responses.
    """


@kedge_command("add", short_help="Add a token and print it, once.")
@click.argument("name")
@click.option("--user", help="The user it belongs to.  [default: NAME]")
@click.option("--admin", is_flag=True, help="It belongs to the administrator.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    help=f"What it gives access to; repeatable.  [default: {', '.join(DEFAULT_SCOPES)}]",
)
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1),
    help="Maximum number of requests per minute.  [default: none]",
)
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(1),
    help="Maximum number of tokens of models per minute.  [default: none]",
)
@store_option
def add(
    name: str,
    user: str | None,
    admin: bool,
    scopes: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
) -> Result:
    """Add a token with NAME and print it. Only its hash is stored, so it cannot be printed again."""
    if admin and user is not None:
        raise click.UsageError("--admin and --user exclude each other")
    if user == "":  # such as of an unset variable: it must not make an administrator
        raise click.UsageError("--user is empty; name a user, or use --admin")

    if admin:
        user = ""  # an administrator is a user without a name

    async def work(opened: Store) -> tuple[AccessToken, str]:
        return await TokenRegistry(opened).add(
            name,
            user=user,
            scopes=scopes or DEFAULT_SCOPES,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )

    token, secret = run_with_store(work, make=True)
    value = {**_token_to_json(token), "token": secret}
    return Result(value, partial(_print_secret, secret))


def _print_secret(secret: str) -> None:
    echo(secret)
    echo(
        "This is shown once. Clients send it as a bearer token; the page asks for it. "
        "From now on servers on this store require a token.",
        err=True,
    )


@kedge_command("list", short_help="List the tokens, without their secrets.")
@with_store(may_miss=True)
async def list_tokens(store: Store) -> Result:
    """List the tokens: their users, scopes and limits per minute."""
    tokens = await TokenRegistry(store).list()
    if not tokens:
        return Result([], "There are no tokens. Add one: kedge auth add NAME")
    return Result([_token_to_json(token) for token in tokens], partial(_print_tokens, tokens))


def _print_tokens(tokens: Sequence[AccessToken]) -> None:
    print_table(
        ("name", "user", "scopes", "requests/min", "tokens/min", "added"),
        [
            (
                token.name,
                sanitize_text(token.namespace) or "(administrator)",
                ", ".join(scope for scope in SCOPES if scope in token.scopes),
                token.requests_per_minute or NO_LIMIT,
                token.tokens_per_minute or NO_LIMIT,
                format_age(token.created_at),
            )
            for token in tokens
        ],
    )


@kedge_command("revoke", short_help="Revoke a token and end its sessions.")
@click.argument("name")
@with_store()
async def revoke(store: Store, name: str) -> Result:
    """Revoke the token with NAME and end its sessions of the page. What its user stored stays."""
    await TokenRegistry(store).revoke(name)
    return Result({"name": name, "revoked": True}, f"{sanitize_text(name)}: revoked")


for subcommand in (add, list_tokens, revoke):
    command.add_command(subcommand)


def _token_to_json(token: AccessToken) -> dict[str, Any]:
    return {  # each user has a namespace of the store
        "name": token.name,
        "user": token.namespace,
        "scopes": [scope for scope in SCOPES if scope in token.scopes],
        "requests_per_minute": token.requests_per_minute,
        "tokens_per_minute": token.tokens_per_minute,
        "created_at": token.created_at,
    }
