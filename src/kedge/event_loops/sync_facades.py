"""Sync versions of async methods, on the background loop of the process.

A facade lists the methods of a class; each has the signature and the docstring of its async method:

    class SyncEngine(SyncFacade["Engine"]):
        run = wrap_method(Engine.run)
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kedge.event_loops.per_loop import ResourceT
from kedge.event_loops.sync_calls import run_sync

P = ParamSpec("P")
T = TypeVar("T")
FacadeT = TypeVar("FacadeT", bound="SyncFacade[Any]")


class SyncFacade(Generic[ResourceT]):
    """The sync methods of an object; ``with`` opens and closes it.

    Args:
        target: The object with the async methods.
    """

    def __init__(self, target: ResourceT) -> None:
        self._target = target

    def __enter__(self) -> Self:
        run_sync(self._target.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the object."""
        run_sync(self._target.aclose())


def wrap_method(
    method: Callable[Concatenate[ResourceT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncFacade[ResourceT], P], T]:
    """Return the sync version of a coroutine method, for a facade."""

    @wraps(method)
    def call(facade: SyncFacade[ResourceT], *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(facade._target, *args, **kwargs))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call


def wrap_navigation(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[FacadeT, P], FacadeT]:
    """Return the sync version of a coroutine method that returns its object or another one of its class."""

    @wraps(method)
    def call(facade: FacadeT, *args: P.args, **kwargs: P.kwargs) -> FacadeT:
        return type(facade)(run_sync(method(facade._target, *args, **kwargs)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call
