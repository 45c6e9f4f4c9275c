"""Test scopes, which distinguish providers, endpoints and accounts without containing keys."""

from kedge.providers.clients import hash_account, make_scope


def test_a_scope_holds_no_credentials() -> None:
    """The key is in no part of the scope."""
    scope = make_scope("openai", "https://api.openai.com/v1", "sk-secret-key")
    assert "secret" not in scope
    assert scope.startswith("openai/api.openai.com/v1/")


def test_another_key_is_another_scope() -> None:
    """Two accounts never share a scope; one account always has the same."""
    url = "https://api.openai.com/v1"
    assert make_scope("openai", url, "a") != make_scope("openai", url, "b")
    assert make_scope("openai", url, "a") == make_scope("openai", url, "a")
    assert make_scope("openai", url, "a", "org1") != make_scope("openai", url, "a", "org2")


def test_no_credentials_are_no_account() -> None:
    """The scope of a server without keys is its address alone."""
    assert hash_account(None, "") == ""
    assert make_scope("responses", "http://localhost:8484/v1/", None) == (
        "responses/localhost:8484/v1"
    )
