"""Settings for every test: hypothesis sets no deadline, and nothing may leave this machine.

A slow machine is no failure. Only the tests of ``tests/live`` may reach a provider, and only when asked.
The examples are the same in every run, so that a failure belongs to the change that caused it;
``HYPOTHESIS_PROFILE=random`` tries others, ``thorough`` thirty times as many. See CONTRIBUTING.md.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kedge.testing import forbid_network

settings.register_profile("kedge", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.register_profile(
    "thorough", deadline=None, max_examples=3_000, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kedge"))

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)  # what a worker starts is not measured

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to Ctrl-C, and so would be our commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Forbid real network calls, unless the live tests were asked for."""
    if os.environ.get("KEDGE_LIVE"):
        yield
        return
    with forbid_network():
        yield


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The address of a PostgreSQL database, started when it is first needed."""
    from postgresql import provide_server_url

    with provide_server_url() as url:
        yield url
