"""Claims on conversation objects: one line of history continues each object.

A conversation object has one end. Two forks, chats or engines that continue it at once would read each other's
messages, so a request first claims the object by compare-and-swap on its last response. Only an answer that was
recorded releases the claim, as the new last response.

A claim has no lease after which another process could continue the object. A request whose end is not known, because
its stream was left or its process ended, may still add to the object at any later time, which no check before the next
request can exclude. So the object is not continued. That costs one full send to a new object; an expired lease would
save these bytes, but the next answer would have to be held back, and generated twice if it was wrong.

All engines of a process share `OBJECT_CLAIMS`. Processes with a common store claim in it as well, so that the answer of
a Turn that another process stored is not held back.
"""

import os
import threading
from os import urandom
from typing import Literal, Protocol, runtime_checkable

import msgspec

from kedge._internal.bounded_dict import BoundedDict

Claim = Literal["owned", "unknown", "taken"]
"""Whether the object ends with the expected response, may do so, or is continued by another line of history."""

MAX_OBJECTS = 65_536
"""The number of objects whose end is in memory; the end of others is not known."""
_TAKEN = ""


@runtime_checkable
class ObjectStore(Protocol):
    """A store of claims that several processes share; see `kedge.store.Store`."""

    async def claim_object(self, scope: str, object_id: str, last: str, *, owner: str) -> Claim:
        """Claim an object that ends with the response ``last``."""
        ...

    async def release_object(self, scope: str, object_id: str, last: str, *, owner: str) -> None:
        """Record the last response in an object that the owner has claimed."""
        ...

    async def take_unused_objects(self, scope: str, limit: int) -> "list[UnusedObject]":
        """Return objects that no line of history continues, which cannot be claimed any more."""
        ...

    async def delete_object(self, unused: "UnusedObject") -> None:
        """Delete the claim of an unused object."""
        ...


class UnusedObject(msgspec.Struct, frozen=True):
    """An object that Kedge made and that no stored line of history continues."""

    name: str
    """The key of its claim."""
    scope: str
    """The provider, endpoint and account."""
    id: str


class ObjectClaims:
    """The last response in each conversation object that this process used."""

    def __init__(self) -> None:
        self.owner = urandom(16).hex()
        """Identifies the process in a store."""
        self._lock = threading.Lock()
        self._ends = BoundedDict[tuple[str, str], str](MAX_OBJECTS)

    def reset(self) -> None:
        """Forget all claims, as a new process has none."""
        self.owner = urandom(16).hex()
        self._lock = threading.Lock()  # a thread of the old process may hold the other one
        self._ends = BoundedDict[tuple[str, str], str](MAX_OBJECTS)

    def find(self, scope: str, object_id: str, last: str) -> Claim:
        """Return the claim that a request after the response ``last`` would get.

        Args:
            scope: The provider, endpoint and account.
            object_id: The conversation object.
            last: The last response in the object, as far as the caller knows.
        """
        end = self._ends.get((scope, object_id))
        if end is None:
            return "unknown"
        if last and end == last:
            return "owned"
        return "taken"

    def claim(self, scope: str, object_id: str, last: str) -> Claim:
        """Claim an object for a request after the response ``last``; for the arguments see ``find``."""
        with self._lock:
            claim = self.find(scope, object_id, last)
            if claim != "taken":
                self._ends[scope, object_id] = _TAKEN
            return claim

    def release(self, scope: str, object_id: str, last: str) -> None:
        """Record that an object ends with this response, so that the next request can claim it."""
        with self._lock:
            self._ends[scope, object_id] = last


OBJECT_CLAIMS = ObjectClaims()
"""The claims of all engines of this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OBJECT_CLAIMS.reset)
