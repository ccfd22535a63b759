"""What ``examples/deploy`` names exists, and what it starts with is valid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvconnect.backends.url import StoreUrl, parse_duration
from kvconnect.cli.main import make_parser
from kvconnect.cli.options.config_file import with_config
from kvconnect.cli.options.http_options import http_fields
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
UNIT = DEPLOY / "kvconnect.service"
COMPOSE = DEPLOY / "compose.yaml"
FILES = ("kvconnect.toml", "container.toml")


def options(name):
    words = ["serve", "--config", str(DEPLOY / name)]
    return make_parser("serve").parse_args(with_config(words, make_parser("serve")))


@pytest.mark.parametrize("name", FILES)
def test_the_configuration_is_one_that_serve_takes(name, monkeypatch):
    monkeypatch.setenv("KVCONNECT_API_KEY", "key")
    found = options(name)
    names = tuple(found.served_model_name)
    ServerSettings(**http_fields(found), model_names=names, require_salt=found.require_salt)
    assert StoreUrl.parse(found.store).scheme in {"disk", "redis"}
    assert not found.transfer_advertise


def test_systemd_accepts_the_unit(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not on PATH: the unit was not checked by systemd")
    program = tmp_path / "kvconnect"
    program.symlink_to(sys.executable)
    text = UNIT.read_text(encoding="utf-8")
    unit = tmp_path / UNIT.name
    unit.write_text(
        text.replace("/usr/local/lib/kvconnect/bin/kvconnect", str(program)), encoding="utf-8"
    )
    assert str(program) in unit.read_text(encoding="utf-8")
    done = subprocess.run(
        [tool, "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def setting(name):
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("stop", ["unit", "compose"])
def test_a_stop_leaves_time_for_requests_and_saves(stop):
    config = options(FILES[0] if stop == "unit" else FILES[1])
    grace = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["kvconnect"]
    given = setting("TimeoutStopSec")[0] if stop == "unit" else grace["stop_grace_period"]
    needed = config.shutdown_timeout_s + KvCacheConnectorConfig().save_timeout_s + 2
    assert parse_duration(given) > needed


def test_the_unit_starts_the_command_with_the_file_that_its_head_installs():
    assert setting("ExecStart") == [
        "/usr/local/lib/kvconnect/bin/kvconnect serve --config /etc/kvconnect/kvconnect.toml"
    ]
    assert "install -D kvconnect.toml /etc/kvconnect/kvconnect.toml" in UNIT.read_text("utf-8")
    assert setting("RestartPreventExitStatus") == ["2"]


def test_every_file_that_compose_mounts_is_there():
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    mounted = [
        volume.partition(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith(".")
    ]
    assert len(mounted) >= 5
    for path in mounted:
        assert (DEPLOY / path).exists(), path
    assert (DEPLOY / services["kvconnect"]["build"]["context"] / "pyproject.toml").exists()
    assert (DEPLOY / "Dockerfile").exists()


def test_prometheus_asks_the_server_that_compose_starts():
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert int(port) == options("container.toml").port
    assert StoreUrl.parse(options("container.toml").store).location.split(":")[0] in services
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in services["prometheus"]["secrets"]


def test_the_image_installs_extras_that_there_are():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    project = (DEPLOY / "../../pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"/src\[([\w,]+)\]", text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
