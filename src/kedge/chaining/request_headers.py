"""What the URL and the headers of a program's request say: whose it is, and whether its body may be replaced."""

import hashlib
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl

from kedge.engines.http_errors import CREDENTIAL_HEADERS, GATEWAY_HEADERS
from kedge.engines.response_bytes import READABLE_CODINGS

ROUTING_COOKIES = frozenset(
    {
        *("__cf_bm", "_cfuvid", "__cfruid", "__cflb", "cf_clearance"),
        *("AWSALB", "AWSALBCORS", "AWSALBTG", "AWSALBTGCORS", "AWSELB", "AWSELBCORS"),
        *("ARRAffinity", "ARRAffinitySameSite", "ApplicationGatewayAffinity"),
        *("ApplicationGatewayAffinityCORS", "ASLBSA", "ASLBSACORS", "GCLB"),
    }
)
"""Cookies of load balancers, which identify a connection, not an account, and change often."""
CREDENTIAL_PARAMS = frozenset(
    {"api-key", "api_key", "apikey", "key", "code", "token", "access_token", "subscription-key"}
)
"""Parameters of a URL that identify an account; their values are stored as a hash only."""
DIGEST_HEADERS = ("content-digest", "content-md5", "digest", "repr-digest", "x-amz-content-sha256")
"""Headers with a digest of the body, which another body would make invalid, as those of a signature."""
ACCOUNT_HEADERS = ("openai-organization", "openai-project")
"""Headers that select the organization and project of a key."""


def find_scope(
    url: SplitResult, path: str, headers: Mapping[str, str], *, user: str, hash_key: bytes
) -> str:
    """Return the scope in which responses are shared: endpoint, organization, project, account and user.

    Args:
        url: The URL of the request.
        path: The path of the endpoint in it.
        headers: The request headers, with lower-case names.
        user: The user for whom a proxy sends the request.
        hash_key: The key with which credentials are hashed; it is never logged.
    """
    address = url.netloc.rpartition("@")[2]  # the HTTP client sends a login as a header
    values = {**headers, "cookie": _drop_routing_cookies(headers.get("cookie", ""))}
    secret = "\0".join(f"{name}={values.get(name, '')}" for name in CREDENTIAL_HEADERS)
    secret += "".join(f"\0{name}={values[name]}" for name in GATEWAY_HEADERS if name in values)
    secret += "".join(f"\0?{name}={value}" for name, value in list_secret_params(url))
    if user:
        secret += f"\0{user}"
    account = hashlib.blake2b(secret.encode(), key=hash_key, digest_size=16)
    owners = [headers.get(name, "") for name in ACCOUNT_HEADERS]
    return "|".join([f"{url.scheme}://{address}{path}", *owners, account.hexdigest()])


def list_secret_params(url: SplitResult) -> list[tuple[str, str]]:
    """Return the parameters of a URL that identify an account."""
    query = parse_qsl(url.query) if url.query else []
    return [(name, value) for name, value in query if name.lower() in CREDENTIAL_PARAMS]


def _drop_routing_cookies(header: str) -> str:
    """Return a `Cookie` header without the cookies of load balancers."""
    cookies = (cookie.strip() for cookie in header.split(";"))
    return "; ".join(
        cookie for cookie in cookies if cookie.partition("=")[0] not in ROUTING_COOKIES
    )


def is_idempotency_key(header: str) -> bool:
    """Return whether a header identifies one request, so that a server rejects it with another body."""
    return header.lower().endswith("idempotency-key")


def find_body_obstacle(headers: Mapping[str, str]) -> str:
    """Return why a request with these headers must keep its body, or an empty string."""
    if headers.get("content-encoding", "identity") != "identity":
        return "encoded"
    if headers.get("authorization", "").startswith("AWS4-"):
        return "signed"
    if any(name in DIGEST_HEADERS or "signature" in name for name in headers):
        return "signed"
    return ""


def limit_codings(accepted: str) -> str:
    """Return an `Accept-Encoding` header without the compressions that cannot be read here.

    A response that cannot be read is neither an anchor nor recognized as the rejection of one.
    """
    codings = [coding.strip() for coding in accepted.split(",")]
    names = [coding.partition(";")[0].strip().lower() for coding in codings]
    readable = [
        coding for coding, name in zip(codings, names, strict=True) if name in READABLE_CODINGS
    ]
    if len(readable) == len(codings) or not accepted:
        return accepted
    return ", ".join(readable) or "identity"
