"""Access tokens, sessions and request counts, on every database."""

import asyncio
from typing import Any

import pytest

from kedge._internal.access_tokens import TokenReservation
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import Store, TokenRegistry, TokenUse, open_store, token_registry
from kedge.store.token_registry import DEFAULT_SCOPES


async def test_token_is_found_only_by_its_secret(store: Store) -> None:
    """The secret is random and stored as a hash; revoking one token does not affect others of the user."""
    registry = TokenRegistry(store)
    token, secret = await registry.add("alice", requests_per_minute=5, tokens_per_minute=100)
    assert (token.name, token.namespace, token.scopes) == ("alice", "alice", {*DEFAULT_SCOPES})
    assert len(secret) > 40
    assert await registry.find(secret) == token == (await registry.list())[0]
    for wrong in ("", "x", "kedge_", secret[:-1], secret + "x", "kedge_\udc80"):
        assert await registry.find(wrong) is None
    rows = await store.database.read(lambda tx: tx.rows("SELECT * FROM access_tokens"))
    assert secret not in str(rows)
    assert secret.encode() not in b"".join(bytes(v) for v in rows[0] if isinstance(v, bytes))
    _, laptop = await registry.add("laptop", user="alice", scopes=["server"])
    await registry.add("phone", user="alice", scopes=["page", "metrics"])
    admin, _ = await registry.add("ops", user="")
    assert admin.namespace == ""
    assert [each.namespace for each in await registry.list()] == ["alice", "alice", "", "alice"]
    await registry.revoke("laptop")
    assert await registry.find(laptop) is None
    assert [each.name for each in await registry.list()] == ["alice", "ops", "phone"]
    with pytest.raises(NotInStore, match="there is no token 'laptop'"):
        await registry.revoke("laptop")


async def test_invalid_tokens_are_rejected() -> None:
    """An invalid name or option raises `InvalidSetting`, and no token is stored."""
    options: list[dict[str, Any]] = [
        *({"name": name} for name in ("", "-x", "a b", "x" * 101, "taken")),
        *({"user": " "}, {"scopes": []}, {"scopes": ["everything"]}),
        *({"requests_per_minute": 0}, {"tokens_per_minute": -1}),
    ]
    async with open_store("sqlite://:memory:") as store:
        registry = TokenRegistry(store)
        await registry.add("taken")
        for each in options:
            with pytest.raises(InvalidSetting):
                await registry.add(**{"name": "a", **each})
        assert len(await registry.list()) == 1
        with pytest.raises(InvalidSetting, match="without a namespace"):
            TokenRegistry(store.use_namespace("alice"))


async def test_sessions_end_with_their_token(store: Store) -> None:
    """A session ends when it expires or when its token is revoked."""
    now = [1000.0]
    registry = TokenRegistry(store, lambda: now[0])
    token, _ = await registry.add("alice")
    first, second = [await registry.start_session("alice", 60.0) for _ in range(2)]
    assert await registry.find_session(first) == token
    assert await registry.find_session("other") is None
    now[0] += 60
    assert await registry.find_session(first) is None
    await registry.start_session("alice", 60.0)
    rows = await store.database.read(lambda tx: tx.rows("SELECT 1 FROM access_sessions"))
    assert len(rows) == 1  # expired sessions were deleted
    third = await registry.start_session("alice", 60.0)
    await registry.count("alice", requests=5)
    await registry.revoke("alice")
    await registry.add("alice")
    assert (await registry.count("alice", requests=1)).requests == 1
    assert await registry.find_session(second) is None
    assert await registry.find_session(third) is None
    ended = await registry.start_session("nobody", 60.0)
    assert await registry.find_session(ended) is None


async def test_counts_are_per_minute(store: Store) -> None:
    """Counts add up within a minute and restart with the next."""
    now = [630.0]
    registry = TokenRegistry(store, lambda: now[0])
    assert await registry.count("a", requests=1) == TokenUse(1, 0, 30.0)
    assert await registry.count("a", tokens=7) == TokenUse(1, 7, 30.0)
    assert await registry.count("b", requests=1) == TokenUse(1, 0, 30.0)
    now[0] = 659.5
    assert await registry.count("a", requests=1) == TokenUse(2, 7, 0.5)
    now[0] = 660.0
    assert await registry.count("a", requests=1) == TokenUse(1, 0, 60.0)
    default = await TokenRegistry(store).count("c", requests=1)
    assert default.requests == 1
    assert 0 < default.seconds_left <= 60


async def test_reservations_are_replaced_by_what_was_used(store: Store) -> None:
    """An estimate counts until it is settled: in its own minute, and what exceeds it in the current one."""
    now = [630.0]
    registry = TokenRegistry(store, lambda: now[0])
    token, _ = await registry.add("a", tokens_per_minute=100)
    first, second = [await registry.reserve(token, 90) for _ in range(2)]
    assert await registry.reserve(token, 1) == TokenUse(0, 180, 30.0)
    assert isinstance(first, TokenReservation)
    assert isinstance(second, TokenReservation)
    await registry.settle(first, 20)
    assert await registry.count("a") == TokenUse(0, 110, 30.0)
    now[0] = 660.0
    await registry.count("a", tokens=5)
    await registry.settle(second, 10)
    assert (await registry.count("a")).tokens == 5
    await registry.settle(second, 97)
    assert (await registry.count("a")).tokens == 12


async def test_parallel_reservations_exceed_a_limit_by_one(lasting_url: str) -> None:
    """Of concurrent reservations of two stores on one database, only one passes the limit."""
    async with open_store(lasting_url) as one, open_store(lasting_url) as two:
        registries = [TokenRegistry(each, lambda: 630.0) for each in (one, two)]
        token, _ = await registries[0].add("a", tokens_per_minute=100)
        reserved = await asyncio.gather(*(registries[i % 2].reserve(token, 30) for i in range(20)))
        accepted = [each for each in reserved if isinstance(each, TokenReservation)]
        assert len(accepted) == 4
        assert (await registries[1].count("a")).tokens == 120


async def test_sessions_are_ended_individually(store: Store) -> None:
    """Ending a stored session deletes it; a signed session is recorded as ended until it expires."""
    registry = TokenRegistry(store)
    await registry.add("alice")
    first, second = [await registry.start_session("alice", 60.0) for _ in range(2)]
    await registry.end_session(first)
    assert await registry.find_session(first) is None
    assert await registry.find_session(second) is not None
    assert not await registry.is_ended("signed")
    for _ in range(2):
        await registry.end_session("signed", 60.0)
    assert await registry.is_ended("signed")
    assert not await registry.is_ended(second)
    assert await registry.find_session("signed") is None


async def test_first_token_is_a_requirement(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens become required when the first one is added, and remain required after it is revoked."""
    monkeypatch.setattr(token_registry, "RECHECK_SECONDS", 0.0)
    assert await TokenRegistry(store).is_required()
    registry = TokenRegistry(store, required=False)
    assert not await registry.is_required()
    await registry.add("alice")
    assert await registry.is_required()
    await registry.revoke("alice")
    assert await registry.is_required()


async def test_unavailable_store_requires_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """If the store cannot be read, a server without required tokens stays open, and the reason is logged."""
    store = await open_store("sqlite://:memory:")
    registry = TokenRegistry(store, required=False)
    await store.aclose()
    assert not await registry.is_required()
    assert "could not be read" in caplog.text
