"""Where a value comes from: a flag, the environment, the file, the default."""

from pathlib import Path

import pytest

from kedge.config import SETTINGS, Config, load_config, mask, mask_url, mask_value
from kedge.config.loader import read_config_file
from kedge.errors import InvalidSetting

TOKEN = "planted-token-0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file that is in force."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KEDGE_CONFIG", str(path))
    path.write_text('model = "xai:grok-4"\n\n[serve]\nport = 9000\n')
    return path


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(file: Path) -> None:
    """And each value knows where it came from."""
    config = Config(file, read_config_file(file), {"KEDGE_SERVE_PORT": "9001"})
    assert config.find("serve.port", 9002).source == "flag"
    found = config.find("serve.port")
    assert (found.value, found.source, found.location) == (9001, "environment", "KEDGE_SERVE_PORT")
    found = config.find("model")
    assert (found.value, found.source, found.location) == ("xai:grok-4", "file", str(file))
    assert config.find("serve.host").source == "default"
    assert config["serve.host"] == "127.0.0.1"


def test_no_file_is_no_error_unless_one_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads nowhere is a mistake worth telling."""
    monkeypatch.delenv("KEDGE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert {value.source for value in load_config({})} == {"default"}
    monkeypatch.setenv("KEDGE_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(InvalidSetting, match="named by KEDGE_CONFIG, does not exist"):
        load_config()


def test_an_empty_variable_is_none(file: Path) -> None:
    """As shells are used: setting it to nothing is unsetting it."""
    config = Config(file, {}, {"KEDGE_MODEL": ""})
    assert config.find("model").source == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = 3", "line 1: model must be a string, not 3"),
        ("\n[serve]\nport = '1'", "line 3: serve.port must be an integer, not '1'"),
        ("[serve]\nport = 70000", "line 2: serve.port must be at least 0 and at most 65535"),
        ("[serve]\nport = true", "line 2: serve.port must be an integer, not True"),
        ("serve.pace = nan", "line 1: serve.pace must be at least 0"),
        ("trace = 1", "line 1: trace must be true or false, not 1"),
        ("mode = 'chain'", "line 1: mode must be one of chained, stateless, conversation"),
        ("# hm\nmodell = 'x'", "line 2: unknown setting 'modell'; did you mean model?"),
        ("port = 1", "line 1: unknown setting 'port'; did you mean port under [serve]?"),
        ("[serve]\nzzz = 1", "line 2: unknown setting 'serve.zzz'"),
        ("qqqqq = 1", "'kedge config' lists all settings"),
        ("model = \n", "is not valid TOML: Invalid value (at line 1"),
        ("[serve\n", "is not valid TOML"),
    ],
)
def test_invalid_file_is_reported_with_position(file: Path, text: str, words: str) -> None:
    """What is wrong, on which line, and what was probably meant."""
    file.write_text(text)
    with pytest.raises(InvalidSetting) as raised:
        load_config()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_unreadable_file_is_reported(file: Path) -> None:
    """A folder in its place, or bytes that are no text."""
    file.write_bytes(b"model = '\xff'")
    with pytest.raises(InvalidSetting, match="not UTF-8"):
        load_config()
    file.unlink()
    file.mkdir()
    with pytest.raises(InvalidSetting, match="cannot be read"):
        load_config()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("serve.port", "0", 0),
        ("serve.pace", "0.5", 0.5),
        ("trace", "Yes", True),
        ("trace", "off", False),
        ("mode", "stateless", "stateless"),
    ],
)
def test_variables_are_read_as_what_they_are_for(name: str, text: str, value: object) -> None:
    """Numbers, switches and choices."""
    assert SETTINGS[name].parse(text, "X") == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("serve.port", "x"), ("serve.port", "1.5"), ("trace", "perhaps"), ("serve.pace", "-1")],
)
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    """So that one knows which to mend."""
    config = Config(Path("x"), {}, {SETTINGS[name].env: text})
    with pytest.raises(InvalidSetting, match=f"{SETTINGS[name].env} must be"):
        config.find(name)


def test_secrets_are_masked_wherever_they_are_shown() -> None:
    """The value, its ``repr`` and an error keep it; a password in an address goes as well."""
    config = Config(Path("x"), {}, {"KEDGE_SERVER_TOKEN": TOKEN})
    found = config.find("serve.token")
    assert found.display_value == "pla…cdef"
    assert TOKEN not in repr(found)
    address = "postgresql://ada:planted-pass@db.example/kedge?sslmode=require"
    assert mask_value(SETTINGS["store"], address) == (
        "postgresql://ada:…@db.example/kedge?sslmode=require"
    )
    with pytest.raises(InvalidSetting) as raised:
        SETTINGS["serve.token"].check(4711, "serve.token")
    assert "4711" not in str(raised.value)


def test_an_address_without_a_password_stays_as_it_is() -> None:
    """Also one with a port, and a model whose name has the sign of an address in it."""
    for address in ("responses:http://127.0.0.1:8484/v1#claude@1", "postgresql://ada@db/kedge"):
        assert mask_url(address) == address


@pytest.mark.parametrize(
    ("secret", "shown"), [("", ""), ("short", "…"), ("x" * 19, "…"), ("abc" + "x" * 20, "abc…xxxx")]
)
def test_a_short_secret_shows_nothing_of_itself(secret: str, shown: str) -> None:
    """A long one shows its ends, so that its owner knows which it is."""
    assert mask(secret) == shown


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:planted@h/d",
        "postgresql://u:planted@odd@h/d",
        "postgresql://h/d?user=u&password=planted",
        "host=h password=planted dbname=d",
        "host=h password='planted word' dbname=d",
        "postgresql://:planted@h",
    ],
)
def test_no_form_of_an_address_shows_its_password(address: str) -> None:
    """In front of the host, as a parameter, or in the words of libpq."""
    shown = mask_url(address)
    assert "planted" not in shown
    assert "word'" not in shown
    assert "h" in shown
