"""``--config FILE``: the options of a command from a file, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.cli.main import make_parser
from kvconnect.cli.options.config_file import with_config
from kvconnect.errors import ConfigurationError


@pytest.fixture
def write(tmp_path):
    def written(text: str) -> Path:
        path = tmp_path / "kvconnect.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def parsed(*arguments: object):
    words = [str(one) for one in arguments]
    command = next(one for one in words if not one.startswith("-"))
    return make_parser(command).parse_args(with_config(words, make_parser(command)))


def test_every_form_of_an_option_can_be_written(write):
    path = write(
        'model = "/model"\n'
        'served-model-name = ["a", "b"]\n'
        "max-attention-window = [128, 4096]\n"
        'peer = ["10.0.0.1", "10.0.0.2:7600"]\n'
        "require-salt = true\n"
        "port = 9000\n"
        'lookup-timeout = "35ms"\n'
        "client_timeout = 1.5\n"
        'store = "disk:/kv?capacity=1GiB"\n'
    )
    found = parsed("serve", "--config", path)
    alone = parsed(
        *("serve", "/model", "--config", path, "--served-model-name", "a", "b"),
        *("--max-attention-window", 128, 4096, "--peer", "10.0.0.1", "--peer", "10.0.0.2:7600"),
        *("--require-salt", "--port", 9000, "--lookup-timeout", "35ms", "--client-timeout", 1.5),
        *("--store", "disk:/kv?capacity=1GiB"),
    )
    assert found == alone
    assert (found.lookup_timeout_ms, found.client_timeout_s) == (35, 1.5)
    assert found.max_queue == 256, "what is not given has its default"


def test_the_command_line_wins(write):
    path = write(
        'model = "/model"\npeer = ["one"]\nserved-model-name = ["a"]\nport = 1\n'
        "require-salt = false\nhost = '10.0.0.1'\n"
    )
    given = ("/other", "--peer=two", "--port", 2, "--require-salt")
    for order in ((*given, "--config", path), (f"--config={path}", *given)):
        found = parsed("-v", "serve", *order)
        assert (found.model, found.peer, found.port) == ("/other", ["two"], 2)
        assert found.require_salt
        assert found.served_model_name == ["a"]
        assert found.host == "10.0.0.1"


def test_a_router_has_one_too(write):
    path = write('decode = ["http://a", "http://b"]\nno-stream-layers = true\nhealth-timeout = 2\n')
    found = parsed("route", "--config", path)
    assert found.decode == ["http://a", "http://b"]
    assert not found.stream_layers
    assert found.health_timeout_s == 2


def test_without_a_file_nothing_changes():
    words = ["serve", "/model", "--peer", "a"]
    assert with_config(words, make_parser("serve")) is words
    assert with_config(["ls", "disk:x"], make_parser("ls")) == ["ls", "disk:x"]
    assert with_config(["serve", "--help"], make_parser("serve")) == ["serve", "--help"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-bach-size = 3", "unknown option 'max-bach-size'; did you mean 'max-batch-size'?"),
        ("lookup-timeout-ms = 3", "unknown option 'lookup-timeout-ms'; did you mean"),
        ("config = 'other'", "unknown option 'config'"),
        ("[engine]\ndtype = 'auto'", "unknown option 'engine'"),
        ("port = true", "port: a value is needed"),
        ("require-salt = 1", "require-salt: true or false is needed"),
        ("port = [1, 2]", "port: one value is needed, not a list"),
        ("port = 2020-01-01", "port: must be text, a number"),
        ("peer = [true]", "peer: must be text, a number"),
        ("port = ", "is not TOML"),
        ("port = 1\nport = 2", "is not TOML"),
        pytest.param("port = " + 100_000 * "[", "is not TOML", id="deep"),
        pytest.param("#" * (1 << 20) + "x", "is larger than 1048576 bytes", id="long"),
    ],
)
def test_what_is_wrong_is_named(write, text, message):
    with pytest.raises(ConfigurationError) as raised:
        parsed("serve", "/model", "--config", write(text))
    assert message in str(raised.value)


def test_an_error_is_exit_code_2(kvconnect, write, tmp_path):
    code, out, err = kvconnect("serve", "m", "--config", write("prot = 1"))
    assert (code, out) == (2, "")
    assert "did you mean 'port'?" in err
    code, _, err = kvconnect("serve", "m", "--config", tmp_path / "absent")
    assert code == 2
    assert "absent: No such file" in err
    code, _, err = kvconnect("serve", "m", "--config", write("port = 'x'"))
    assert code == 2
    assert "argument --port: invalid int value: 'x'" in err
    code, _, err = kvconnect("serve", "--config", write("port = 1"))
    assert code == 2
    assert "required: MODEL" in err
