"""Schemathesis over the API: whatever is sent, it keeps to its own document."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kedge.web.api import OPENAPI_DOCUMENT
from web.conftest import PageServer, serve_page

REJECTIONS = ["400", "404", "405", "409", "413", "415", "422"]
"""The statuses that reject a request; a body can be too large as well as wrong."""
CONFIG = {"checks": {"negative_data_rejection": {"expected-statuses": REJECTIONS}}}
schema = schemathesis.openapi.from_dict(
    OPENAPI_DOCUMENT, config=SchemathesisConfig.from_dict(CONFIG)
)
CHECKS = (
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PageServer, str]]:
    """A page with a conversation that has a fork."""
    with serve_page(tmp_path_factory.mktemp("schema")) as page:
        name = page.create_conversation("First", "Second")
        nodes = page.get(f"/api/conversations/{name}/chain")["nodes"]
        page.post(f"/api/conversations/{name}/turns", text="Third", at=nodes[0]["node"])
        yield page, name


@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_api_matches_its_document(case: Any, known: tuple[PageServer, str]) -> None:
    """For good and for bad requests, to a conversation that is there and to others."""
    page, name = known
    given = (case.path_parameters or {}).get("id", "")
    if case.method != "DELETE" and len(given) % 2:
        case.path_parameters["id"] = name
    case.call_and_validate(base_url=page.url, checks=CHECKS, timeout=300)
