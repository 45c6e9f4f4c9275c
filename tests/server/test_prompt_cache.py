"""The prompt cache: automatic prefixes, lifetimes and shared prefixes."""

from collections.abc import Iterator
from typing import Any

from openai import OpenAI

from kedge.server import prompt_cache
from kedge.server.prompt_cache import Breakpoint, PromptCache
from kedge.testing import TestServer

LONG = "word " * 2000


def cached(client: OpenAI, **members: Any) -> tuple[str, int]:
    """Return the id of a new response and the number of its cached tokens."""
    response = client.responses.create(model="practice", **members)
    assert response.usage
    return response.id, response.usage.input_tokens_details.cached_tokens


def test_a_full_resend_shares_the_prefix_of_the_chain(client: OpenAI) -> None:
    """A conversation sent in full, also as a chat, has a cached prefix as a chained one has."""
    first = client.responses.create(model="practice", input=LONG)
    history: list[Any] = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": first.output_text},
    ]
    _, chained = cached(client, input="Next?", previous_response_id=first.id)
    _, resent = cached(client, input=[*history, {"role": "user", "content": "Next?"}])
    _, other = cached(client, input=[*history, {"role": "user", "content": "Another?"}])
    assert chained > 1900
    assert resent >= chained
    assert other >= chained
    messages = [*history, {"role": "user", "content": "Next?"}]
    usage: Any = client.chat.completions.create(model="practice", messages=messages).usage
    assert usage.prompt_tokens_details.cached_tokens > 1900


def test_a_change_before_the_prompt_misses(client: OpenAI) -> None:
    """Other instructions, tools or cache keys cause a miss; below 1,024 tokens nothing is cached."""
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
        for name in "ab"
    ]
    settings: dict[str, Any] = {"instructions": "Be brief.", "tools": tools}
    cached(client, input=LONG, **settings)
    assert cached(client, input=LONG, **settings)[1] > 1900
    assert cached(client, input=LONG, **{**settings, "instructions": "It is 12:01."})[1] == 0
    assert cached(client, input=LONG, **{**settings, "tools": tools[::-1]})[1] == 0
    assert cached(client, input=LONG, **settings, prompt_cache_key="k")[1] == 0
    assert cached(client, input="x" + LONG, **settings)[1] == 0
    assert [cached(client, input="word " * 900)[1] for _ in range(2)] == [0, 0]


def test_a_longer_retention_applies_to_a_prompt_that_is_already_cached() -> None:
    """The next request sets the lifetime, also directly after one with a shorter lifetime."""
    now = [0.0]
    cache = PromptCache(lambda: now[0])
    assert [cache.use_prompt([(b"a", 2000)], lifetime) for lifetime in (600.0, 86_400.0)] == [
        0,
        1920,
    ]
    now[0] = 700.0
    assert cache.use_prompt([(b"a", 2000)]) == 1920


def test_prefixes_expire_without_use(client: OpenAI, server: TestServer) -> None:
    """A prefix expires ten minutes after its last use, or after the requested retention."""
    cached(client, input=LONG)
    server.clock.advance(seconds=500)
    assert cached(client, input=LONG)[1] > 1900
    server.clock.advance(seconds=500)
    assert cached(client, input=LONG)[1] > 1900
    server.clock.advance(seconds=601)
    assert cached(client, input=LONG, prompt_cache_retention="24h")[1] == 0
    server.clock.advance(seconds=80_000)
    assert cached(client, input=LONG)[1] > 1900


def test_prefixes_of_a_long_chain_are_renewed() -> None:
    """A request reads only new prefixes, and all of them after a tenth of their lifetime."""
    now = 0.0
    cache = PromptCache(lambda: now)
    digests = [bytes([number]) for number in range(100)]
    read = 0

    def prompt(length: int) -> Iterator[prompt_cache.Prefix]:
        nonlocal read
        for number in range(length, 0, -1):
            read += 1
            yield digests[number - 1], 2048 + number

    for length in range(1, 90):
        cache.use_prompt(prompt(length))
    assert read == 2 * 89 - 1
    now = 90.0
    read = 0
    cache.use_prompt(prompt(90))
    assert read == 90
    now = 680.0
    assert cache.use_prompt([(digests[0], 2049)]) == 2048
    now = 1_400.0
    assert cache.use_prompt([(digests[1], 2050)]) == 0


def test_a_prefix_is_found_from_a_breakpoint_near_it() -> None:
    """A breakpoint is at most 20 blocks after it."""
    digests = [bytes([number]) for number in range(60)]
    cache = PromptCache(lambda: 0.0)
    assert cache.use_breakpoints(digests, [Breakpoint(5, 3000, 300)], 1024) == (0, 3000)
    assert cache.use_breakpoints(digests, [Breakpoint(24, 5000, 300)], 1024) == (3000, 2000)
    assert cache.use_breakpoints(digests, [Breakpoint(50, 9000, 300)], 1024) == (0, 9000)


def test_the_least_recently_used_prefix_is_dropped() -> None:
    """The cache has a maximum number of prefixes."""
    digests = [bytes([number]) for number in range(3)]
    cache = PromptCache(lambda: 0.0, max_entries=2)
    for digest in digests:
        cache.use_prompt([(digest, 2048)])
    assert [cache.use_prompt([(digests[at], 2048)]) for at in (0, 2)] == [0, 2048]
