"""``/metrics``: the counters of the process, and access to them."""

import httpx2
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families as parse

from kedge.observe import reset
from kedge.testing import serve
from server.waiting import TIMEOUT

KEY = "sk-planted-key"


def scrape(url: str, **headers: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the value of every sample by name and labels."""
    answer = httpx2.get(f"{url}/metrics", headers=headers, verify=False, timeout=TIMEOUT)
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(answer.text)
        for sample in family.samples
    }


def test_requests_and_responses_are_counted_by_route_and_memory() -> None:
    """Requests are counted by the pattern of their route, not by a path with an id."""
    reset()
    with serve() as server, OpenAI(base_url=server.base_url, api_key="any") as client:
        first = client.responses.create(model="practice", input="My name is Ada.")
        client.responses.create(model="practice", input="And?", previous_response_id=first.id)
        client.responses.retrieve(first.id)
        httpx2.get(f"{server.url}/nowhere/{first.id}", verify=False, timeout=TIMEOUT)
        samples = scrape(server.url)
        body = httpx2.get(f"{server.url}/metrics", verify=False, timeout=TIMEOUT).text
    requests = {
        labels: value
        for (name, labels), value in samples.items()
        if name == "server_requests_total"
    }
    assert requests[("route", "/v1/responses"), ("status", "200")] == 2
    assert requests[("route", "/v1/responses/{id}"), ("status", "200")] == 1
    assert requests[("route", "none"), ("status", "404")] == 1
    responses = {
        labels: value
        for (name, labels), value in samples.items()
        if name == "server_responses_total"
    }
    assert responses == {
        (("memory", "nothing"), ("status", "completed")): 1,
        (("memory", "response"), ("status", "completed")): 1,
    }
    assert first.id not in body
    assert "Ada" not in body


def test_metrics_require_the_token() -> None:
    """The metrics require the server's token, and other host names are rejected."""
    with serve(token=KEY) as server:
        assert httpx2.get(f"{server.url}/metrics", verify=False, timeout=TIMEOUT).status_code == 401
        assert scrape(server.url, Authorization=f"Bearer {KEY}")
    with serve() as server:
        strange = {"Host": "evil.example"}
        assert (
            httpx2.get(
                f"{server.url}/metrics", headers=strange, verify=False, timeout=TIMEOUT
            ).status_code
            == 403
        )
