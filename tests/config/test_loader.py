"""Tests of the sources of a setting: flag, environment, file and default."""

import os
from pathlib import Path

import pytest

from for_each import for_each
from kedge.config import (
    Config,
    load_config,
    mask,
    mask_url,
    mask_value,
    read_config_file,
    store_url,
)
from kedge.config.settings import SETTINGS
from kedge.errors import CannotOpenStore, InvalidSetting

TOKEN = "planted-token-0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a configuration file, set KEDGE_CONFIG to its path and return it."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KEDGE_CONFIG", str(path))
    path.write_text('model = "xai:grok-4"\n\n[serve]\nport = 9000\n')
    return path


def test_precedence_of_sources(file: Path) -> None:
    """A flag overrides the environment, which overrides the file; without any there is the default."""
    config = Config(file, read_config_file(file), {"KEDGE_SERVE_PORT": "9001"})
    assert config.find("serve.port", 9002).source == "flag"
    setting = config.find("serve.port")
    found = (setting.value, setting.source, setting.location)
    assert found == (9001, "environment", "KEDGE_SERVE_PORT")
    setting = config.find("model")
    assert (setting.value, setting.source, setting.location) == ("xai:grok-4", "file", str(file))
    assert config.find("serve.host").source == "default"
    assert config["serve.host"] == "127.0.0.1"


def test_blank_variables_are_unset(file: Path) -> None:
    """A variable of blanks has no value, and is not reported as unknown."""
    blank = {"KEDGE_MODEL": " ", "KEDGE_SYSTEM": "", "KEDGE_SERVE_PORT": "\t", "KEDGE_MODLE": " "}
    config = Config(file, {}, blank)
    assert {config.find(name).source for name in ("model", "system", "serve.port")} == {"default"}
    assert not config.unknown_variables


def test_variables_are_parsed(file: Path) -> None:
    """Switches and choices are accepted in any case; another value is an error that names the variable."""
    config = Config(file, {}, {"KEDGE_TRACE": "Yes", "KEDGE_LOG_LEVEL": "INFO"})
    assert (config["trace"], config["log_level"]) == (True, "info")
    with pytest.raises(InvalidSetting, match="KEDGE_TRACE must be"):
        _ = Config(file, {}, {"KEDGE_TRACE": "perhaps"})["trace"]


def test_configured_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing default file is accepted; a missing file named by KEDGE_CONFIG is an error."""
    monkeypatch.delenv("KEDGE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert {value.source for value in load_config({})} == {"default"}
    monkeypatch.setenv("KEDGE_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(InvalidSetting, match="named by KEDGE_CONFIG, does not exist"):
        load_config()


@for_each(
    ("text", "message"),
    [
        ("model = 3", "line 1: model must be a string, not 3"),
        ("\n[serve]\nport = '1'", "line 3: serve.port must be an integer, not '1'"),
        ("[serve]\nport = 70000", "line 2: serve.port must be at least 0 and at most 65535"),
        ("serve.max_body_mb = inf", "must be at least 0.001 and finite, not inf"),
        (f"timeout = 1{'0' * 400}", "finite, not a number of that size"),
        (f"model = {'[' * 20_000}", "is not valid TOML"),
        ("mode = 'chain'", "line 1: mode must be one of chained, stateless, conversation"),
        ("# hm\nmodell = 'x'", "line 2: unknown setting 'modell'; did you mean model?"),
        ("modle = 'x'", "unknown setting 'modle'; did you mean model?"),  # not mode
        ("port = 1", "line 1: unknown setting 'port'; did you mean port under [serve]?"),
        ("[server]\nmodel = 'x'", "'server.model'; did you mean model under [serve]?"),
        ("[serve]\nstore = 'x'", "'serve.store'; did you mean store, before the first section?"),
        ("KEDGE_MODEL = 'x'", "'KEDGE_MODEL'; did you mean model?"),
        ("serve = 1", "'serve'; it is a section: write [serve], and its settings below that line"),
        (
            "[openai]\napi_key = 'x'",
            "API keys are read from the environment, such as OPENAI_API_KEY",
        ),
        ("model = \n", "is not valid TOML: Invalid value (at line 1"),
    ],
)
def test_invalid_file_is_reported_with_position(file: Path, text: str, message: str) -> None:
    """The error has the problem, the line and a suggestion."""
    file.write_text(text)
    with pytest.raises(InvalidSetting) as exc_info:
        load_config()
    assert message in str(exc_info.value)
    assert "\n" not in str(exc_info.value)
    assert str(file) in str(exc_info.value)


def test_unreadable_file_is_reported(file: Path) -> None:
    """A file that is not UTF-8, one without an end such as a device, or a folder in its place, is reported."""
    file.write_bytes(b"model = '\xff'")
    with pytest.raises(InvalidSetting, match="not UTF-8"):
        load_config()
    file.write_text("#" * 2**21)
    with pytest.raises(InvalidSetting, match="cannot be read: it has more than 1,000,000 bytes"):
        load_config()
    file.unlink()
    file.mkdir()
    with pytest.raises(InvalidSetting, match="cannot be read: Is a directory"):
        load_config()


def test_only_a_regular_file_is_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named pipe, whose writer would be waited for, and a device are reported; a link to a file is followed."""
    file.rename(tmp_path / "real.toml")
    file.symlink_to("real.toml")
    assert load_config()["serve.port"] == 9000
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidSetting, match=r"config\.toml cannot be read: it is not a"):
        load_config()
    monkeypatch.setenv("KEDGE_CONFIG", "/dev/zero")
    with pytest.raises(InvalidSetting, match="/dev/zero cannot be read: it is not a regular file"):
        load_config()


@for_each(
    ("variable", "similar"),
    [
        ("KEDGE_PORT", "KEDGE_SERVE_PORT"),
        ("KEDGE_SERVE_TOKEN", "KEDGE_SERVER_TOKEN"),
        ("KEDGE_APIKEY", "KEDGE_API_KEY"),
        ("KEDGE_MODEL_TEA", ""),
        ("KEDGE_LIVE", ""),
    ],
)
def test_unknown_variables_are_listed(variable: str, similar: str) -> None:
    """Variables that are ignored are listed with the one that is most likely meant; empty ones are not."""
    environ = {
        variable: "x",
        "KEDGE_MODEL": "x",
        "KEDGE_PRICES": "x",
        "KEDGE_NONE": "",
        "PATH": "x",
    }
    assert Config(Path("x"), {}, environ).unknown_variables == {variable: similar}


def test_secret_setting_is_masked() -> None:
    """A token is shown neither in a value for display nor in a repr or an error."""
    config = Config(Path("x"), {}, {"KEDGE_SERVER_TOKEN": TOKEN})
    setting = config.find("serve.token")
    assert setting.display_value == "pla…cdef"
    assert TOKEN not in repr(setting)
    with pytest.raises(InvalidSetting) as exc_info:
        SETTINGS["serve.token"].check(4711, "serve.token")
    assert "4711" not in str(exc_info.value)


def test_masked_secret_shows_its_ends_if_it_is_long() -> None:
    """Of a short secret nothing is shown."""
    for secret, masked in (("", ""), ("x" * 19, "…"), ("abc" + "x" * 20, "abc…xxxx")):
        assert mask(secret) == masked


def test_password_in_a_setting_is_masked() -> None:
    """The rest of the address is shown."""
    address = "postgresql://ada:planted-pass@db.example/kedge?sslmode=require"
    assert mask_value(SETTINGS["store"], address) == (
        "postgresql://ada:…@db.example/kedge?sslmode=require"
    )
    address = "responses:http://ada:planted-pass@ai.example/v1#m"
    assert mask_value(SETTINGS["model"], address) == "responses:http://ada:…@ai.example/v1#m"
    for name in ("store", "serve.db", "proxy.db"):
        assert "planted-pass" not in mask_value(SETTINGS[name], "postgresql://a:planted-pass@b/c")


def test_password_in_any_address_is_masked() -> None:
    """The forms of an address in which a password may be written; an address without one is unchanged."""
    for address in (
        *("postgresql://u:planted@odd@h/d", "postgresql://:planted@h"),
        *("postgresql://h/d?user=u&password=planted", "host=h password='planted word' dbname=d"),
    ):
        shown = mask_url(address)
        assert "planted" not in shown
        assert "word'" not in shown
        assert "h" in shown
    for address in ("responses:http://127.0.0.1:8484/v1#claude@1", "postgresql://ada@db/kedge"):
        assert mask_url(address) == address


@for_each("separator", ["/", "?", "#"])
def test_no_part_of_an_unescaped_password_is_shown(separator: str) -> None:
    """An address with such a password is a mistake, which must not show it."""
    address = f"postgresql://ada:planted{separator}pass@db:5432/kedge?sslmode=require"
    assert mask_url(address) == "postgresql://ada:…@db:5432/kedge?sslmode=require"
    model = f"responses:http://ada:planted{separator}pass@127.0.0.1:9/v1#m"
    assert mask_url(model) == "responses:http://ada:…@127.0.0.1:9/v1#m"


def test_no_secret_member_of_an_address_is_shown() -> None:
    """Members with a secret are masked in queries and in connection strings, which are no addresses of stores."""
    for address in (
        "host=h password = planted dbname=d",
        r"host=h password='it\'s planted' dbname=d",
        r"dbname=d password=is\ planted",
    ):
        assert "planted" not in mask_url(address)
        with pytest.raises(CannotOpenStore, match="postgresql://user@host") as error:
            store_url(address)
        assert "planted" not in str(error.value)
    for name in ("api_key", "api-key", "token"):
        assert mask_url(f"responses:http://h/v1?{name}=planted&a=1") == (
            f"responses:http://h/v1?{name}=…&a=1"
        )
    for address in ("http://[::1]:8484/v1#claude@1", "responses:http://h:8484?x#a@b"):
        assert mask_url(address) == address
