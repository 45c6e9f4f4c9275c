"""Whether providers can be reached with the keys that are set: one request each, in bounded time.

The requests are the standard library's, so that what is found out is about the network, not about an SDK.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from kedge.cli.checks import Check
from kedge.config import mask_url


@dataclass(frozen=True, slots=True)
class Place:
    """Where a provider answers ``GET /models``, and how it wants the key."""

    provider: str
    key: str
    base_url: str = ""
    url: str = ""
    header: str = "Authorization"
    before: str = "Bearer "
    path: str = ""
    """What follows the address that the variable holds."""
    more: tuple[tuple[str, str], ...] = ()


PLACES = (
    Place("openai", "OPENAI_API_KEY", "https://api.openai.com/v1", "OPENAI_BASE_URL"),
    Place("xai", "XAI_API_KEY", "https://api.x.ai/v1"),
    Place(
        "azure",
        "AZURE_OPENAI_API_KEY",
        url="AZURE_OPENAI_ENDPOINT",
        header="api-key",
        before="",
        path="/openai/v1",
    ),
    Place(
        "anthropic",
        "ANTHROPIC_API_KEY",
        "https://api.anthropic.com/v1",
        "ANTHROPIC_BASE_URL",
        header="x-api-key",
        before="",
        path="/v1",
        more=(("anthropic-version", "2023-06-01"),),
    ),
)


def check_providers(environ: Mapping[str, str], model: str, timeout: float) -> Iterator[Check]:
    """Ask every provider whose key is set, and the server of the configured model, all at once."""
    asked = [place for place in PLACES if environ.get(place.key)]
    asked += _own(model, environ)
    if not asked:
        yield Check("online", "note", "no key is set and no server configured: nobody to ask")
        return
    with ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(ask, place, environ, timeout) for place in asked]
        yield from (each.result() for each in running)


def _own(model: str, environ: Mapping[str, str]) -> list[Place]:
    """The server of the configured model, if it is none of the providers above."""
    kind, _, rest = model.partition(":")
    if kind == "ollama":
        from kedge.providers.known import ollama_address

        return [Place("ollama", "", ollama_address(environ.get("OLLAMA_HOST", "")))]
    address = rest.rpartition("#")[0]
    return [Place(kind, "KEDGE_API_KEY", address)] if "://" in address else []


def ask(place: Place, environ: Mapping[str, str], timeout: float) -> Check:
    """One request for the list of models: the smallest thing that needs a key."""
    given = environ.get(place.url, "").rstrip("/") if place.url else ""
    base = given.removesuffix(place.path) + place.path if given else place.base_url
    address = f"{base.rstrip('/')}/models"
    name, shown = f"reach {place.provider}", mask_url(address)
    request = urllib.request.Request(_without_password(address), headers=dict(place.more))  # noqa: S310 - the user's own address
    key = environ.get(place.key, "").strip() if place.key else ""
    if key:
        request.add_header(place.header, f"{place.before}{key}")
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310 - the same
            took = (time.perf_counter() - started) * 1000
            return Check(name, "ok", f"{shown} answered in {took:.0f} ms")
    except urllib.error.HTTPError as error:
        error.close()
        return _refused(name, shown, place.key, error.code)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or type(error).__name__
        advice = "Look at the address, the network and the proxy; --timeout waits longer."
        return Check(name, "wrong", f"{shown} cannot be reached: {why}", advice)


def _without_password(address: str) -> str:
    """The address as ``urlopen`` takes it; it would read a name and a password as a host."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _refused(name: str, shown: str, key: str, status: int) -> Check:
    if status in (401, 403):
        return Check(name, "wrong", f"{shown} refuses the key ({status})", f"Set {key} anew.")
    if status in (404, 405):
        return Check(name, "ok", f"{shown} is there, and has no list of models ({status})")
    return Check(name, "note", f"{shown} answered {status}", "It may be in trouble; try later.")
