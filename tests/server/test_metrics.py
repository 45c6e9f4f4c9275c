"""``/metrics``: the counters of the process, and access to them."""

from typing import Any

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families as parse

from kedge.observe import reset
from kedge.testing import TestServer, serve
from server.conftest import ask, open_client

KEY = "sk-planted-key"


def scrape(server: TestServer, **headers: str) -> dict[str, dict[tuple[Any, ...], float]]:
    """Return the value of every sample by name and labels."""
    with open_client(server, **headers) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200
    samples: dict[str, dict[tuple[Any, ...], float]] = {}
    for family in parse(answer.text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[*sorted(sample.labels.items())] = sample.value
    return samples


def test_requests_and_responses_are_counted_by_route_and_memory() -> None:
    """Requests are counted by the pattern of their route, not by a path with an id."""
    reset()
    with (
        serve() as server,
        OpenAI(base_url=server.base_url, api_key="any") as client,
        open_client(server) as http,
    ):
        first = ask(client, "My name is Ada.")
        ask(client, "And?", first.id)
        client.responses.retrieve(first.id)
        http.get(f"/nowhere/{first.id}")
        samples = scrape(server)
        body = http.get("/metrics").text
    requests = samples["server_requests_total"]
    assert requests[("route", "/v1/responses"), ("status", "200")] == 2
    assert requests[("route", "/v1/responses/{id}"), ("status", "200")] == 1
    assert requests[("route", "none"), ("status", "404")] == 1
    assert samples["server_responses_total"] == {
        (("memory", "nothing"), ("status", "completed")): 1,
        (("memory", "response"), ("status", "completed")): 1,
    }
    assert first.id not in body
    assert "Ada" not in body


def test_metrics_require_the_token() -> None:
    """The metrics require the server's token, and other host names are rejected."""
    with serve(token=KEY) as server, open_client(server) as http:
        assert http.get("/metrics").status_code == 401
        assert scrape(server, Authorization=f"Bearer {KEY}")
    with serve() as server, open_client(server, Host="evil.example") as http:
        assert http.get("/metrics").status_code == 403
