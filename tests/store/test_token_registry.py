"""Access tokens, sessions and request counts, on every database."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kedge._internal.access_tokens import TokenReservation
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import Store, TokenRegistry, TokenUse, open_store, token_registry
from kedge.store.token_registry import DEFAULT_SCOPES
from store.sample_conversations import count_rows, read_files


async def test_token_is_found_only_by_its_secret(store: Store) -> None:
    """A token has the namespace of its name and the default scopes, and is found by its whole secret."""
    registry = TokenRegistry(store)
    token, secret = await registry.add("alice", requests_per_minute=5, tokens_per_minute=100)
    assert (token.name, token.namespace, token.scopes) == ("alice", "alice", {*DEFAULT_SCOPES})
    assert len(secret) > 40
    assert await registry.find(secret) == token == (await registry.list())[0]
    for wrong in ("", "x", "kedge_", secret[:-1], secret + "x", "kedge_\udc80"):
        assert await registry.find(wrong) is None


async def test_secret_of_a_token_is_not_stored(tmp_path: Path) -> None:
    """The files of a store do not contain the secret, which is stored as a hash."""
    async with open_store(f"sqlite:///{tmp_path}/s.db") as store:
        _, secret = await TokenRegistry(store).add("alice")
    files = read_files(tmp_path)
    assert b"alice" in files
    assert secret.encode() not in files


async def test_tokens_of_one_user(store: Store) -> None:
    """Several tokens may have one user, and the operator's have none."""
    registry = TokenRegistry(store)
    await registry.add("laptop", user="alice", scopes=["server"])
    await registry.add("phone", user="alice", scopes=["page", "metrics"])
    await registry.add("ops", user="")
    tokens = {token.name: token.namespace for token in await registry.list()}
    assert tokens == {"laptop": "alice", "phone": "alice", "ops": ""}


async def test_revoked_token_is_not_found(store: Store) -> None:
    """Revoking one token does not affect the others of its user."""
    registry = TokenRegistry(store)
    _, laptop = await registry.add("laptop", user="alice")
    phone_token, phone = await registry.add("phone", user="alice")
    await registry.revoke("laptop")
    assert await registry.find(laptop) is None
    assert await registry.find(phone) == phone_token
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


async def test_session_has_its_token_until_it_expires(store: Store) -> None:
    """A session is found for its time; expired ones are deleted when another one starts."""
    now = [1000.0]
    registry = TokenRegistry(store, lambda: now[0])
    token, _ = await registry.add("alice")
    session = await registry.start_session("alice", 60.0)
    assert await registry.find_session(session) == token
    assert await registry.find_session("other") is None
    now[0] += 60
    assert await registry.find_session(session) is None
    await registry.start_session("alice", 60.0)
    assert await count_rows(store, "access_sessions") == [1]


async def test_sessions_end_with_their_token(store: Store) -> None:
    """A token with the same name has none of the sessions and counts of one that was revoked."""
    registry = TokenRegistry(store)
    await registry.add("alice")
    session = await registry.start_session("alice", 60.0)
    await registry.count("alice", requests=5)
    await registry.revoke("alice")
    await registry.add("alice")
    assert (await registry.count("alice", requests=1)).requests == 1
    assert await registry.find_session(session) is None


async def test_session_without_a_token_has_ended(store: Store) -> None:
    """A session of a name that no token has is never found."""
    registry = TokenRegistry(store)
    session = await registry.start_session("nobody", 60.0)
    assert await registry.find_session(session) is None


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
