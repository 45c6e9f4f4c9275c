"""Claims: the right of one process to answer the message of an idempotency key, or the next run of a queue.

A process claims a key in the store before it runs the turn, renews the claim while the turn runs, and releases it
at the end. Other processes with the same key wait for the answer, or until the claim expires.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec

from kedge._internal.event_loops import run_to_end
from kedge._internal.wait_policy import WaitPolicy
from kedge.engines import Request
from kedge.errors import StoreError
from kedge.planning.digests import canonical_json
from kedge.store import Claim, ConversationRow, Store
from kedge.turns import Block, new_id
from kedge.turns.frozen_json import to_encodable

DEFAULT_LEASE = 30.0
"""Seconds after which a claim expires unless it is renewed; it is renewed after a third of this time."""
QUEUE_KEY = ""
"""The key of the claim of the run that a queue has begun; keys of callers are not empty."""
CLAIM_POLLS = WaitPolicy(
    "the attempt to claim a message that another process is sending",
    first=0.02,
    longest=0.5,
    factor=1.5,
)


class ClaimRequest(msgspec.Struct, frozen=True):
    """An idempotency key of a conversation, and the owner that claims it."""

    store: Store
    row: ConversationRow
    key: str
    owner: str
    lease: float

    async def acquire(self, blocks: Sequence[Block], options: Mapping[str, Any]) -> Claim:
        """Return the claim, acquired or answered; wait while another process runs the turn.

        Raises:
            KeyReused: The key belongs to another request.
        """
        request_hash = _hash_request(blocks, options)
        pauses = CLAIM_POLLS.pauses()
        while True:
            acquired = self.store.claim(
                self.row, self.key, request_hash=request_hash, owner=self.owner, lease=self.lease
            )
            try:
                claim = await run_to_end(acquired)
            except anyio.get_cancelled_exc_class():
                await self.release()
                raise
            if claim.is_owner or claim.answer:
                return claim
            await anyio.sleep(next(pauses))

    @asynccontextmanager
    async def maintain(self) -> AsyncGenerator[None]:
        """Renew the claim during the run, and release it at the end: the run may have no answer yet."""
        renewing = asyncio.create_task(self._renew_periodically())
        try:
            yield
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing
            await self.release()

    async def release(self) -> None:
        """End the claim, so that another process may acquire it."""
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await self.store.renew(self.row, self.key, owner=self.owner, lease=0)

    async def _renew_periodically(self) -> None:
        while True:
            await asyncio.sleep(self.lease / 3)
            # The next renewal is before the claim expires, and may succeed.
            with suppress(StoreError):
                await self.store.renew(self.row, self.key, owner=self.owner, lease=self.lease)


@asynccontextmanager
async def hold_queue(store: Store, row: ConversationRow, lease: float) -> AsyncGenerator[None]:
    """Wait until no other process answers a message of this conversation from its queue, and answer one."""
    request = ClaimRequest(store, row, QUEUE_KEY, new_id("run"), lease)
    await request.acquire((), {})
    async with request.maintain():
        yield


_TRANSPORT_OPTIONS = frozenset({"streaming", "tap", "candidates", "before_send", "output_retries"})
"""Options of a run that are not part of the request's hash."""


def _hash_request(blocks: Sequence[Block], options: Mapping[str, Any]) -> bytes:
    """Return a hash of a request: the messages as a model reads them, the model and all settings."""
    settings = {name: value for name, value in options.items() if name not in _TRANSPORT_OPTIONS}
    if "tools" in settings:
        settings["tools"] = Request.of(tools=settings["tools"]).tools
    if "output" in settings:
        settings["output"] = settings["output"].request_options()
    described = json.dumps(settings, sort_keys=True, default=to_encodable).encode()
    messages = hashlib.sha256(b"\n".join(canonical_json(block) or b"" for block in blocks))
    return hashlib.sha256(b"request\n" + messages.digest() + described).digest()
