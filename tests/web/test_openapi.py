"""Schemathesis tests that the API matches its OpenAPI document."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from kedge.web.api import get_openapi_document
from strategies import scale_examples
from web.conftest import PageServer, serve_page

if TYPE_CHECKING:
    from requests import Session

Known = tuple[PageServer, str, "Session"]
REJECTIONS = ["400", "404", "405", "409", "413", "415", "422"]
"""The statuses that reject a request; a body can be both too large and invalid."""
METHODS = {"get", "put", "post", "delete", "patch"}
CONFIG = {"checks": {"negative_data_rejection": {"expected-statuses": REJECTIONS}}}


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Known]:
    """Yield a page, the id of a conversation that has a fork, and a session that keeps connections open."""
    from requests import Session

    with serve_page(tmp_path) as page, Session() as session:
        session.trust_env = False  # which would look for proxies at each request
        name = page.create_conversation("First", "Second")
        nodes = page.get(f"/api/conversations/{name}/tree")["nodes"]
        page.post(f"/api/conversations/{name}/runs", message="Third", at=nodes[0]["node"])
        yield page, name, session


def is_chosen(case: Any) -> bool:
    """Return whether a case is one of the third that ``make test`` sends; a campaign sends all."""
    text = f"{case.method} {case.path_parameters} {case.query} {case.headers} {case.body!r}"
    return scale_examples(1) > 1 or zlib.crc32(text.encode("utf-8", "replace")) % 3 == 0


def check_case(case: Any, known: Known) -> None:
    """Send one valid or invalid request, to the known conversation or to another id."""
    if not is_chosen(case):
        return
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    page, name, session = known
    id_ = (case.path_parameters or {}).get("id", "")
    if case.method != "DELETE" and len(id_) % 2:
        case.path_parameters["id"] = name
    expected = (
        not_a_server_error,
        checks.content_type_conformance,
        checks.negative_data_rejection,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.status_code_conformance,
    )
    case.call_and_validate(base_url=page.url, session=session, checks=expected, timeout=300)


def test_api_matches_its_document(known: Known, subtests: pytest.Subtests) -> None:
    """Every operation matches the document; Schemathesis is imported here because that takes seconds."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.core.result import Ok
    from schemathesis.pytest.lazy import get_all_tests

    document = get_openapi_document()
    assert known[0].get("/api/openapi.json") == json.loads(json.dumps(document))
    schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(CONFIG))
    limits = settings(
        max_examples=scale_examples(2),
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    count = 0
    for built in get_all_tests(
        schema=schema, test_func=check_case, settings=limits, given_kwargs=None
    ):
        assert isinstance(built, Ok), built
        operation, run = built.ok()
        with subtests.test(operation.label):
            run(known=known)
        count += 1
    assert count == sum(method in METHODS for path in document["paths"].values() for method in path)
