"""Claims are valid independently of the clocks of the callers.

`KEDGE_SKEWS=1000` runs a longer campaign.
"""

import os
import random
import time

from kedge.store import Store, open_store

SKEWS = int(os.environ.get("KEDGE_SKEWS", "10"))


async def test_claim_is_independent_of_clocks(lasting_url: str) -> None:
    """A caller with a wrong clock cannot claim a key that another caller holds."""
    rng = random.Random(5)
    async with open_store(lasting_url) as store:
        row = await store.create()
        for number in range(SKEWS):
            skews = [rng.uniform(-1e5, 1e5) for _ in range(3)]
            owners = [
                await claim_with_skew(store, row.id, f"k{number}", f"owner {index}", skew)
                for index, skew in enumerate(skews)
            ]
            assert owners == [True, False, False], skews


async def claim_with_skew(store: Store, name: str, key: str, owner: str, skew: float) -> bool:
    """Claim a key with a clock that is wrong by this many seconds; return whether it was acquired."""
    skewed = Store(store.database, clock=lambda: time.time() + skew)
    row = await skewed.conversation(name)
    claim = await skewed.claim(row, key, request_hash=b"x", owner=owner, lease=600.0)
    renewed = await skewed.renew(row, key, owner=owner, lease=600.0)
    assert renewed is claim.is_owner
    return claim.is_owner
