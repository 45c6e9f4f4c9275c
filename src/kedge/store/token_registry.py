"""Named tokens: access to a server, a page and its API, each with a user and rate limits.

A token is random and long, so a SHA-256 of it is stored: the hash cannot be reversed, and does not need a
slow function as a password would. Tokens are looked up by the hash. Sessions of the page are random as well,
and stored in the same way; they end with their token.

The counts of a token are one row, which one statement updates, with the database's clock. So limits apply to
all processes on a database together, and two of them cannot both use the last request of a minute.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable

from kedge._internal.access_tokens import AccessToken, TokenReservation, TokenUse
from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_type, describe_value
from kedge._internal.event_loops import AsyncResource
from kedge.errors import InvalidSetting, NotInStore, StoreError, StoreReplaced
from kedge.observe import get_logger
from kedge.store.database.transactions import Database, Row, Tx
from kedge.store.open import StoreAddress, share_store
from kedge.store.records import validate_namespace
from kedge.store.store import Store

log = get_logger("kedge.store")

TOKEN_PREFIX = "kedge_"
TOKEN_BYTES = 32
SCOPES = ("server", "page", "api", "metrics")
"""The scopes of a token: ``/v1``, the page, ``/api`` and ``/metrics``."""
DEFAULT_SCOPES = ("server", "page", "api")
MINUTE = 60
MAX_LIMIT = 10**15
"""The maximum limit per minute; the sums of counts fit into the integers of every database."""
RECHECK_SECONDS = 1.0
"""Seconds between checks whether a store without tokens has one."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
_COLUMNS = "t.name, t.namespace, t.scopes, t.requests_per_minute, t.tokens_per_minute, t.created_at"


class TokenRegistry(AsyncResource):
    """The named tokens of a store, with their sessions and counts.

    Example:
        async with TokenRegistry("kedge.db") as registry:
            token, secret = await registry.add("alice")

    Args:
        store: The store, without a namespace, or its address; ``async with`` or ``aclose`` then closes it.
        clock: A function that returns the time for counts and sessions; the database's time by default.
        required: Whether a server requires a token even while the store has none.

    Raises:
        InvalidSetting: The store is bound to a namespace.
    """

    @checked
    def __init__(
        self,
        store: Store | StoreAddress,
        clock: Callable[[], float] | None = None,
        *,
        required: bool = True,
    ) -> None:
        self._shared_store = share_store(store)
        store = self._shared_store.resource
        if store.namespace:
            raise InvalidSetting("tokens belong to the store without a namespace")
        self._database = store.database
        self._store_clock = store.clock
        self._clock = clock
        self._is_required = required
        self._recheck_at = 0.0
        self.check_health = store.database.check_health
        """Raises a `StoreError` unless the database answers and can be written."""

    async def aclose(self) -> None:
        """Close the store, if it was opened by its address and has no other users."""
        await self._shared_store.aclose()

    @checked
    async def add(
        self,
        name: str,
        *,
        user: str | None = None,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> tuple[AccessToken, str]:
        """Add a token.

        Args:
            name: Its name, which is unique.
            user: Its user, by default one with the token's name; empty for the administrator.
            scopes: Its scopes: ``server``, ``page``, ``api``, ``metrics``.
            requests_per_minute: The maximum number of requests per minute; None for any.
            tokens_per_minute: The maximum number of tokens of models per minute; None for any.

        Returns:
            The token, and its secret, which is not stored.

        Raises:
            InvalidSetting: A value is not allowed, or there is a token with this name.
        """
        check_type("name", str, name)
        if not _NAME.fullmatch(name):
            raise InvalidSetting(
                "the name of a token must be 1 to 100 letters, digits or . _ @ + -, "
                "and begin with a letter or digit"
            )
        namespace = name  # by default, the user has the name of the token
        if user is not None:
            namespace = validate_namespace(user) if user else ""
        granted = _validate_scopes(scopes)
        _check_limit(requests_per_minute)
        _check_limit(tokens_per_minute)
        secret = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        token = AccessToken(
            name, namespace, granted, requests_per_minute, tokens_per_minute, self._store_clock()
        )
        inserted = await self._run(
            "INSERT INTO access_tokens (name, namespace, hash, scopes, requests_per_minute, "
            "tokens_per_minute, created_at) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO NOTHING",
            name,
            namespace,
            _hash(secret),
            " ".join(scope for scope in SCOPES if scope in granted),
            requests_per_minute,
            tokens_per_minute,
            token.created_at,
        )
        if not inserted:
            raise InvalidSetting(
                f"there is already a token {name!r}; revoke it, or use another name"
            )
        return token, secret

    async def _run(self, statement: str, *values: object) -> int:
        return await self._database.write(lambda tx: tx.run(statement, values))

    async def _select(self, condition: str, *values: object) -> list[AccessToken]:
        query = f"SELECT {_COLUMNS} FROM access_tokens t {condition}"
        rows = await self._database.read(lambda tx: tx.rows(query, values))
        return [
            AccessToken(name, namespace, frozenset(scopes.split()), *rest)
            for name, namespace, scopes, *rest in rows
        ]

    async def list(self) -> list[AccessToken]:
        """Return all tokens, in the order of their names."""
        return await self._select("ORDER BY t.name")

    @checked
    async def revoke(self, name: str) -> None:
        """Delete a token, its sessions and its counts; the data of its user is retained.

        Raises:
            NotInStore: There is no token with this name.
        """

        def work(tx: Tx) -> int:
            tx.run("DELETE FROM access_sessions WHERE token = ?", (name,))
            tx.run("DELETE FROM access_counts WHERE token = ?", (name,))
            return tx.run("DELETE FROM access_tokens WHERE name = ?", (name,))

        if not await self._database.write(work):
            raise NotInStore(f"there is no token {name!r}; 'kedge auth list' lists them")

    async def is_required(self) -> bool:
        """Return whether a server requires a token: always after the store has had one.

        A store without tokens is checked at most once a second. If it cannot be read, the last known
        result applies.

        Raises:
            StoreReplaced: The file of the store was removed or replaced.
        """
        now = time.monotonic()
        if not self._is_required and now >= self._recheck_at:
            self._recheck_at = now + RECHECK_SECONDS
            try:
                self._is_required = bool(await self._select("LIMIT 1"))
            except StoreReplaced:  # there may be tokens in the file that is there now
                self._recheck_at = 0.0
                raise
            except StoreError as error:
                log.warning("the tokens of the store could not be read: %s", error)
        return self._is_required

    @checked
    async def find(self, token: str) -> AccessToken | None:
        """Return the token with this secret, or None."""
        if not token.startswith(TOKEN_PREFIX):
            return None
        return next(iter(await self._select("WHERE t.hash = ?", _hash(token))), None)

    async def is_valid(self, token: AccessToken) -> bool:
        """Return whether a token that was found before still exists, with the same rights."""
        return await self._select("WHERE t.name = ?", token.name) == [token]

    @checked
    async def start_session(self, name: str, seconds: float) -> str:
        """Start a session of the page for a token, and return its secret."""
        secret = secrets.token_urlsafe(TOKEN_BYTES)

        now, values = self._now(self._database)
        await self._run(f"DELETE FROM access_sessions WHERE expires_at <= {now}", *values)
        await self._run(
            "INSERT INTO access_sessions (hash, token, expires_at) "
            f"SELECT ?, name, {now} + ? FROM access_tokens WHERE name = ?",
            *(_hash(secret), *values, seconds, name),
        )
        return secret

    @checked
    async def end_session(self, secret: str, seconds: float | None = None) -> None:
        """End a session.

        Args:
            secret: Its secret.
            seconds: The time for which `is_ended` must remember the end of a session that is not stored,
                because it is signed with the server's token.
        """
        if seconds is None:
            await self._run("DELETE FROM access_sessions WHERE hash = ?", _hash(secret))
            return
        now, values = self._now(self._database)
        await self._run(
            f"INSERT INTO access_sessions (hash, token, expires_at) VALUES (?, '', {now} + ?) "
            "ON CONFLICT (hash) DO UPDATE SET token = '', expires_at = excluded.expires_at",
            *(_hash(secret), *values, seconds),
        )

    async def is_ended(self, secret: str) -> bool:
        """Return whether a signed session was ended."""
        query = "SELECT 1 FROM access_sessions WHERE hash = ? AND token = ''"
        return bool(await self._database.read(lambda tx: tx.rows(query, (_hash(secret),))))

    async def find_session(self, secret: str) -> AccessToken | None:
        """Return the token of a session that has neither ended nor expired, or None."""
        now, values = self._now(self._database)
        condition = (
            f"JOIN access_sessions s ON s.token = t.name WHERE s.hash = ? AND s.expires_at > {now}"
        )
        return next(iter(await self._select(condition, _hash(secret), *values)), None)

    @checked
    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> TokenUse:
        """Add to the counts of a token in the current minute, in one statement.

        Args:
            name: The name of the token.
            requests: The requests to add.
            tokens: The tokens of models to add.

        Returns:
            The counts afterwards.
        """
        row = await self._database.write(lambda tx: self._add_counts(tx, name, requests, tokens))
        return TokenUse(*row[:3])

    async def reserve(self, token: AccessToken, tokens: int) -> TokenReservation | TokenUse:
        """Count the estimated tokens of a request before its model uses them, if the limit is not reached.

        So requests at the same time exceed the limit of a token by at most the last one of them.

        Args:
            token: The token, which has a limit of tokens.
            tokens: The estimate.

        Returns:
            The reservation, or the counts of the token if its limit is reached.
        """
        limit = token.tokens_per_minute or MAX_LIMIT
        estimate = min(tokens, MAX_LIMIT)

        def work(tx: Tx) -> TokenReservation | TokenUse:
            _, counted, _, minute = self._add_counts(tx, token.name, 0, estimate)
            if counted - estimate < limit:
                return TokenReservation(token.name, estimate, minute)
            return TokenUse(*self._add_counts(tx, token.name, 0, -estimate)[:3])

        return await self._database.write(work)

    async def settle(self, reservation: TokenReservation, tokens: int) -> None:
        """Replace the estimate of a reservation by the tokens that were used.

        They count in the minute of the reservation; what exceeds it counts in the current minute.
        """
        excess = tokens - reservation.tokens
        if excess > 0:
            await self.count(reservation.name, tokens=excess)
            return
        query = "UPDATE access_counts SET tokens = tokens + ? WHERE token = ? AND minute = ?"
        await self._run(query, excess, reservation.name, reservation.minute)

    def _add_counts(self, tx: Tx, name: str, requests: int, tokens: int) -> Row:
        """Add to the counts of a token; return them with the seconds until the next minute, and the minute."""
        now, values = self._now(tx)
        counted = "CASE WHEN c.minute = excluded.minute THEN c.{0} ELSE 0 END + excluded.{0}"
        return tx.rows(
            f"INSERT INTO access_counts AS c (token, minute, requests, tokens) "
            f"VALUES (?, {tx.dialect.floor.format(f'{now} / {MINUTE}')}, ?, ?) "
            f"ON CONFLICT (token) DO UPDATE SET requests = {counted.format('requests')}, "
            f"tokens = {counted.format('tokens')}, minute = excluded.minute "
            f"RETURNING requests, tokens, {MINUTE} * (minute + 1) - {now}, minute",
            (name, *values, requests, min(tokens, MAX_LIMIT), *values),
        )[0]

    def _now(self, tx: Tx | Database) -> tuple[str, tuple[float, ...]]:
        """Return the SQL of the current time, and the values of its placeholders."""
        if self._clock is None:
            return tx.dialect.now, ()
        return "?", (self._clock(),)


def _validate_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """Return the scopes of a token; raise if there is none, or an unknown one."""
    granted = frozenset(scopes)
    unknown = granted - set(SCOPES)
    if unknown:
        raise InvalidSetting(f"unknown scope {min(unknown)!r}; use {', '.join(SCOPES)}")
    if not granted:
        raise InvalidSetting(f"a token needs a scope; use {', '.join(SCOPES)}")
    return granted


def _check_limit(limit: int | None) -> None:
    """Raise if a limit per minute is neither None nor a positive integer that every database can add up."""
    if limit is None:
        return
    check_type("a limit per minute", int, limit)
    if not 1 <= limit <= MAX_LIMIT:
        shown = describe_value(limit)
        raise InvalidSetting(f"a limit per minute must be from 1 to 10^15, not {shown}")


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
