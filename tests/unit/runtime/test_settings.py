"""Settings: precedence, refusals, and the one line that says what is wrong and where."""

from pathlib import Path

import pytest
from pydantic import Field

from trimtab.config.settings import (
    ServiceSettings,
    SettingsError,
    is_loopback,
    load_settings,
    split_address,
)
from trimtab.config.yamlfile import YamlError, parse_yaml_documents


class DemoSettings(ServiceSettings):
    """Settings of a demonstration."""

    targets: list[str] = Field(default=[], description="files of targets")
    actuators: dict[str, str] = Field(default={}, description="addresses by cluster")
    interval_s: float = Field(1.0, gt=0)
    note: str | None = None


def load(*argv: str, **environ: str) -> DemoSettings:
    return load_settings(DemoSettings, argv, environ)


def test_defaults() -> None:
    settings = load()
    assert settings.listen == "127.0.0.1:7000"
    assert settings.reflection is True
    assert settings.targets == []


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("interval_s: 1.5\nlog_level: warning\nnote: file\n")
    settings = load("--config", str(file), "--interval-s", "3.5", TRIMTAB_INTERVAL_S="2.5", TRIMTAB_NOTE="environment")
    assert (settings.interval_s, settings.note, settings.log_level) == (3.5, "environment", "warning")


def test_config_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("targets: [a.json, b.json]\nactuators: {eu: 'h:1'}\n")
    settings = load(TRIMTAB_CONFIG=str(file))
    assert settings.targets == ["a.json", "b.json"]
    assert settings.actuators == {"eu": "h:1"}


def test_lists_and_mappings_from_text() -> None:
    settings = load("--targets=a.json, b.json", "--actuators", "eu=127.0.0.1:1,us=127.0.0.1:2")
    assert settings.targets == ["a.json", "b.json"]
    assert settings.actuators == {"eu": "127.0.0.1:1", "us": "127.0.0.1:2"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--no-reflection"], False),
        (["--reflection"], True),
        (["--reflection=false"], False),
        (["--reflection", "no"], False),
        (["--reflection", "--note", "x"], True),
    ],
)
def test_booleans(argv: list[str], expected: bool) -> None:
    assert load(*argv).reflection is expected


def test_a_value_may_hold_an_equals_sign_and_start_with_a_dash() -> None:
    assert load("--note=-a=b").note == "-a=b"
    assert load("--note", "-5").note == "-5"


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--lisen", "x"], {}, ["unknown flag --lisen", "--listen"]),
        (["stray"], {}, ["unknown flag stray"]),
        (["--note"], {}, ["--note needs a value"]),
        (["--note", "a", "--note", "b"], {}, ["--note is given twice"]),
        (["--no-note"], {}, ["unknown flag --no-note"]),
        (["--no-reflection=x"], {}, ["--no-reflection takes no value"]),
        (["--interval-s", "0"], {}, ["--interval-s", "greater than 0"]),
        (["--interval-s", "soon"], {}, ["--interval-s", "number"]),
        (["--interval-s", "nan"], {}, ["--interval-s", "finite"]),
        ([], {"TRIMTAB_INTERVAL_S": "inf"}, ["TRIMTAB_INTERVAL_S", "finite"]),
        ([], {"TRIMTAB_INTERVALL_S": "1"}, ["TRIMTAB_INTERVALL_S", "did you mean TRIMTAB_INTERVAL_S"]),
        (["--actuators", "eu"], {}, ["--actuators", "'eu' is not key=value"]),
        (["--actuators", "eu=1,eu=2"], {}, ["'eu' is given twice"]),
        (["--listen", "127.0.0.1"], {}, ["--listen", "not host:port"]),
        (["--listen", "127.0.0.1:http"], {}, ["--listen", "port is a number"]),
        (["--listen", "::1:80"], {}, ["--listen", "[address]:port"]),
        (["--listen", "0.0.0.0:7000"], {}, ["reachable from other machines", "tls_cert_file"]),
        (["--tls-cert-file", "c.pem"], {}, ["belong together"]),
        (["--tls-client-ca-file", "ca.pem"], {}, ["needs tls_cert_file"]),
        (["--store-url", "http://x"], {}, ["--store-url", "redis://"]),
        (["--log-level", "loud"], {}, ["--log-level"]),
        (["--config", "/does/not/exist.yaml"], {}, ["/does/not/exist.yaml", "No such file"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(DemoSettings, argv, environ)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("intervall_s: 1\n", ["unknown key 'intervall_s'", "interval_s"]),
        ("interval_s: 1\ninterval_s: 2\n", [":2:1", "given twice"]),
        ("interval_s: [\n", ["settings.yaml:"]),
        ("- 1\n", ["one mapping"]),
        ("a: 1\n---\nb: 2\n", ["one mapping"]),
        ("interval_s: -1\n", ["settings.yaml: interval_s", "greater than 0"]),
        ("targets: [1, 2]\n", ["settings.yaml: targets[0]", "and 1 more"]),
        ("note: &a x\nlog_level: *a\n", ["aliases are not supported"]),
        ("note: \x00\n", ["settings.yaml"]),
    ],
)
def test_a_bad_file_names_itself(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load("--config", str(file))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_secret_in_a_bad_store_url_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        load("--store-url", "rediss//user:hunter2@host")
    assert "hunter2" not in str(caught.value)


def test_variables_of_kubernetes_and_of_other_services_are_no_mistake() -> None:
    settings = load(
        TRIMTAB_ACTUATOR_SERVICE_HOST="10.0.0.1", TRIMTAB_LISTEN_PORT="tcp://10.0.0.1:80", TRIMTAB_FLEET_NODES="4"
    )
    assert settings == DemoSettings()


def test_help_lists_every_setting_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all("--" + name.replace("_", "-") in text for name in DemoSettings.model_fields)
    assert "files of targets" in text


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().log_level = "debug"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("address", "expected"), [("h:0", ("h", 0)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:80", ("10.0.0.1", 80))]
)
def test_split_address(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", ":80", "h", "h:", "h:65536", "h:-1", "h:²", "::1"])
def test_split_address_refuses(address: str) -> None:
    with pytest.raises(ValueError, match=r"port|IPv6"):
        split_address(address)


def test_loopback() -> None:
    assert [
        host for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "::", "host") if is_loopback(host)
    ] == [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "localhost",
    ]


def test_yaml_that_bombs_is_refused() -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\n"
    with pytest.raises(YamlError, match="aliases"):
        parse_yaml_documents(bomb, source="bomb")
    with pytest.raises(YamlError, match="bomb"):
        parse_yaml_documents("[" * 20_000, source="bomb")


def test_yaml_builds_plain_data_only() -> None:
    with pytest.raises(YamlError, match=r"evil:1:1"):
        parse_yaml_documents("!!python/object/apply:os.getcwd []", source="evil")
