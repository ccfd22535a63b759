"""Store URLs, and which backend serves them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backends import StoreUrl, open_backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.url import format_size, parse_duration, parse_size
from kvconnect.errors import ConfigurationError, MissingExtra, UnknownScheme


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("64k", 64 << 10),
        ("64KiB", 64 << 10),
        ("1.5GiB", 3 << 29),
        ("2gb", 2_000_000_000),
        ("200GiB", 200 << 30),
        ("3 TiB", 3 << 40),
        ("7B", 7),
    ],
)
def test_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1e9", "0", "0.1B", "5 apples", "1GiB2", "8192PiB", "9" * 400],
)
def test_bad_size_names_field_value_and_remedy(text):
    with pytest.raises(
        ConfigurationError, match=r"^capacity=.*(a size such as|at least one byte|below 8192PiB)"
    ):
        parse_size(text, field="capacity")


@given(st.integers(1, 1 << 50))
def test_size_in_bytes_is_exact(nbytes):
    assert parse_size(str(nbytes)) == pytest.approx(nbytes, abs=0 if nbytes < 1 << 53 else 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("45s", 45), ("500ms", 0.5), ("30m", 1800), ("12h", 43200), ("7d", 604800)],
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["0", "7 years", "d", "-1s", "9999999999d"])
def test_bad_duration_names_field_value_and_remedy(text):
    with pytest.raises(ConfigurationError, match=r"^ttl="):
        parse_duration(text, field="ttl")


def test_sizes_read_well():
    assert [format_size(n) for n in (17, 4096, 3 << 29)] == ["17 B", "4 KiB", "1.5 GiB"]


def test_password_is_not_shown():
    url = StoreUrl.parse("redis://user:secret@host:6379/0?ttl=1d")
    assert "secret" not in str(url)
    assert str(url) == "redis://user:***@host:6379/0?ttl=1d"


@pytest.mark.parametrize(
    "text",
    [
        "redis://me:secret@host?ttl=1h&ttl=2h",
        "redis://me:secret@host#0",
        "redis://me:secret@[host",
        "//me:secret@host",
        "redis+sentinel://host/name?sentinel_password=secret&ttl=",
        "tiered:?tiers=redis://me:secret@host,memory:&write",
    ],
)
def test_password_is_not_shown_of_a_url_that_is_wrong(text):
    with pytest.raises(ConfigurationError, match=r"\*\*\*") as caught:
        StoreUrl.parse(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/var/cache/kv", "a scheme is needed"),
        ("", "a scheme is needed"),
        ("disk:///a#b", "%23"),
        ("disk:///a?ttl=1d&ttl=2d", "ttl is given twice"),
        ("disk:///a?ttl=", "ttl has no value"),
        ("disk:///a?capacity", "bad query field|has no value"),
        ("disk:///a?capactiy=1GiB", "unknown parameter 'capactiy'; did you mean 'capacity'"),
        ("disk:///a?capacity=lots", "capacity=lots: a size such as"),
        ("disk:///a?durability=forever", "durability=forever: unknown; did you mean .power"),
        ("disk:", "a directory is needed"),
        ("disk:///", "a directory is needed"),
        ("disk://cache/kv", "write disk:///cache/kv, or disk:cache/kv"),
        ("memory:/some/where", "has no place"),
        ("memory:?ttl=1d", "unknown parameter 'ttl'"),
    ],
)
def test_bad_url_says_what_is_wrong(text, message):
    with pytest.raises(ConfigurationError, match=message):
        open_backend(text)


def test_unknown_scheme_names_the_nearest():
    with pytest.raises(UnknownScheme, match="'dsk' is unknown; did you mean 'disk'"):
        open_backend("dsk:///a")


def test_url_of_each_kind_opens_its_backend(tmp_path):
    disk = open_backend(f"disk://{tmp_path}/a%20b?capacity=1GiB&durability=power&ttl=7d").inner
    assert isinstance(disk, DiskBackend)
    assert disk._settings.path == tmp_path / "a b"
    assert (disk._settings.capacity, disk._settings.durability) == (1 << 30, "power")
    memory = open_backend("memory:?capacity=2MiB").inner
    assert isinstance(memory, MemoryBackend)
    assert memory.capacity == 2 << 20


def test_relative_and_home_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_backend("disk:kv/cache").inner._settings.path == tmp_path / "kv" / "cache"
    assert open_backend("disk:~/cache").inner._settings.path == tmp_path / "cache"


def test_making_a_store_touches_nothing(tmp_path):
    open_backend(f"disk://{tmp_path}/store")
    assert list(tmp_path.iterdir()) == []


def test_a_backend_of_ones_own_is_wrapped_once():
    guarded = open_backend(MemoryBackend())
    assert open_backend(guarded) is guarded


class FakeEntryPoint:
    extras: tuple[str, ...] = ()
    name = "mine"

    def __init__(self, load):
        self.load = load


def install(monkeypatch, entry):
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group, name=None: [entry] if name == "mine" else [],
    )


def test_entry_point_serves_its_scheme(monkeypatch):
    made = []
    install(monkeypatch, FakeEntryPoint(lambda: lambda url: made.append(url) or MemoryBackend()))
    assert isinstance(open_backend("mine://there/x").inner, MemoryBackend)
    assert (made[0].scheme, made[0].location, made[0].path) == ("mine", "there", "/x")


def test_entry_point_that_cannot_be_imported_names_the_extra(monkeypatch):
    def load():
        raise ImportError("No module named 'minelib'")

    install(monkeypatch, FakeEntryPoint(load))
    with pytest.raises(MissingExtra, match=r"pip install '\.\[mine\]'"):
        open_backend("mine:")


def test_entry_point_that_makes_something_else_is_refused(monkeypatch):
    install(monkeypatch, FakeEntryPoint(lambda: lambda url: Path()))
    with pytest.raises(ConfigurationError, match="not a Backend"):
        open_backend("mine:")
