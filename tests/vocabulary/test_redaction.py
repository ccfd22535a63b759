"""No password is shown, by anything that prints, of any URL: right, wrong or torn apart."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvconnect import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.backends import StoreUrl, open_backend
from kvconnect.backends.guard.calls import mapped
from kvconnect.backends.guard.labels import place_of
from kvconnect.backends.registry import codecs_of
from kvconnect.cli.main import main
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.runtime.loading import build_worker, connector_classes
from kvconnect.errors import BackendUnavailable, ConfigurationError, KvConnectError, nearest
from kvconnect.redaction import text_without_passwords, without_passwords
from kvconnect.text import shown

PIECES = ("Kx1q", "Ly2w", "Mz3v")
"""What every password here is made of. No output may hold one of them."""

SEPARATORS = ["", *"/@?#%&=:+,;[]\"'\\{}|^~!$()*<> \t", "%2F", "%%", "//", "@/", "/@", "?a=", "&&"]
ODD_IN_TEXT = set("\"'<> \t()&")
"""Where a URL in a text ends, or a parameter in it: only of passwords without them it is known."""

IN_LOCATION = (
    "redis://user:{}@127.0.0.1:1/0?ttl=7d",
    "redis://:{}@127.0.0.1:1",
    "rediss://user:{}@127.0.0.1",
    "redis+cluster://user:{}@127.0.0.1:1,127.0.0.1:2?prefix=kv:",
    "redis+sentinel://user:{}@127.0.0.1:1/mymaster/0",
    "redis+unix://user:{}@/no/such.sock?db=1",
    "s3://ID:{}@bucket/prefix?endpoint_url=http://127.0.0.1:1",
    "s3://bucket?endpoint_url=http://user:{}@127.0.0.1:1",
    "tiered:?tiers=memory:,redis://user:{}@127.0.0.1:1/0",
    "disk://user:{}@host/var/cache/kv",
    "memory://user:{}@host",
    "unknown://user:{}@host/path?capacity=1GiB",
)
WITHOUT_SLASHES = ("redis:user:{}@127.0.0.1:1", "redis:///user:{}@127.0.0.1:1", "//user:{}@host")
WITHOUT_HOST = ("redis://user:{}", "redis://:{}", "s3://ID:{}", "tiered:?tiers=redis://user:{}")
IN_PARAMETERS = (
    "redis+sentinel://127.0.0.1:1/mymaster?sentinel_password={}",
    "redis+sentinel://127.0.0.1:1/mymaster?sentinel_pasword={}&ttl=7d",
    "redis://127.0.0.1:1?passwd={}",
    "redis://127.0.0.1:1/0?ttl=7d&password={}",
    "s3://bucket?secret_access_key={}&region=x",
    "disk:///var/cache/kv?token={}",
    "memory:?pwd={}",
)


@st.composite
def passwords(draw) -> str:
    """Pieces with something between them that URLs, texts or programs may split at."""
    one, two = draw(st.sampled_from(SEPARATORS)), draw(st.sampled_from(SEPARATORS))
    text = PIECES[0] + one + PIECES[1] + two + PIECES[2]
    return draw(st.sampled_from([text, quote(text, ""), quote(quote(text, ""), "")]))


def urls(*templates: str) -> st.SearchStrategy[str]:
    return st.builds(str.format, st.sampled_from(templates), passwords())


# Of "redis://user:one@two" the password is "one": where there is no host, it has no "@".
LOST_HOST = urls(*WITHOUT_HOST).filter(lambda url: "@" not in unquote(unquote(url)))
EVERY_URL = urls(*IN_LOCATION, *WITHOUT_SLASHES, *IN_PARAMETERS) | LOST_HOST


@contextmanager
def shown_to(seen: list[str]) -> Iterator[None]:
    """What is raised, with the whole of its traceback, is seen."""
    try:
        yield
    except KvConnectError as error:
        seen += [str(error), repr(error)]
        for one in _shown_chain(error):
            seen += traceback.format_exception_only(one)


def _shown_chain(error: BaseException) -> Iterator[BaseException]:
    yield error
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if following is not None:
        yield from _shown_chain(following)


def parsed(url: str, seen: list[str]) -> None:
    parts = StoreUrl.parse(url)
    seen += [str(parts), repr(parts), f"{parts}", place_of(parts)]
    parts.allow("ttl", "prefix", "endpoint_url", "tiers", "capacity")


def opened(url: str, seen: list[str]) -> None:
    store = open_backend(url)
    seen += [repr(store), str(store.inner), store.place, store.name]
    seen += [repr(vars(store.inner)), repr(getattr(store.inner, "_settings", ""))]


def configured(url: str, seen: list[str]) -> None:
    config = KvCacheConnectorConfig(url=url)
    args = LlmArgs("model", KvCacheConfig(), config, (), b"")
    seen += [str(config), repr(config), f"{config!r:.5000}", repr(args), str(args)]
    config.url = url  # frozen


def named(url: str, seen: list[str]) -> None:
    fields = ("connector_module", "connector_scheduler_class", "connector_worker_class")
    config = KvCacheConnectorConfig(**dict.fromkeys(fields, url))
    connector_classes(LlmArgs("model", KvCacheConfig(), config, (), b""))


PRINTERS: dict[str, Callable[[str, list[str]], object]] = {
    "without_passwords": lambda url, seen: seen.append(without_passwords(url)),
    "StoreUrl": parsed,
    "open_backend": opened,
    "codecs_of": lambda url, seen: codecs_of(url),
    "configuration": configured,
    "with two ways": lambda url, seen: KvCacheConnectorConfig(url=url, connector_module=url),
    "of a module": named,
    "of another type": lambda url, seen: KvCacheConnectorConfig(url=[url], backend=url),
    "of another field": lambda url, seen: KvCacheConnectorConfig(save_on=url, min_priority=url),
}


@pytest.mark.parametrize("printer", PRINTERS)
@given(url=EVERY_URL)
@example(url="redis://127.0.0.1:1?passwd=Kx1q@Ly2w(Mz3v")
def test_no_printer_shows_a_password(printer: str, url: str) -> None:
    if printer.startswith("of a") and not in_text(url):
        return
    seen: list[str] = []
    with shown_to(seen):
        PRINTERS[printer](url, seen)
    assert not [piece for piece in PIECES for text in seen if piece in text], seen


def in_text(url: str) -> bool:
    """Whether it can be told where `url` ends in a text."""
    simple = not ODD_IN_TEXT & set(url.partition(PIECES[0])[2])
    return "://" in url and (simple or any(url.startswith(one[:16]) for one in IN_LOCATION[:2]))


@given(url=urls(*IN_LOCATION))
def test_text_of_another_program_shows_no_password_before_a_host(url: str) -> None:
    if not url.startswith(("tiered:", "s3://bucket")):
        text = f'Error 111 connecting to "{url}": refused.\nnext line: a@b'
        shown = text_without_passwords(text)
        assert not [piece for piece in PIECES if piece in shown], shown
        assert shown.endswith("next line: a@b")


@given(url=urls(*IN_LOCATION, *IN_PARAMETERS) | LOST_HOST)
def test_what_a_library_raises_shows_no_password(url: str) -> None:
    if not in_text(url):
        return
    seen: list[str] = []
    with shown_to(seen), mapped("store", "load"):
        raise OSError(f"cannot connect to '{url}'") from LookupError(f"no route to {url}")
    assert "store: load failed: cannot connect to '" in seen[0]
    assert not [piece for piece in PIECES for text in seen if piece in text], seen


def _broken(kind: type[Exception], url: str) -> type[Any]:
    class Broken:
        def __init__(self, llm_args: LlmArgs) -> None:
            raise kind(f"no answer from '{url}'") from LookupError(f"no route to {url}")

    return Broken


@pytest.mark.parametrize("kind", [OSError, ConfigurationError, BackendUnavailable])
@settings(max_examples=30)
@given(url=urls(*IN_LOCATION, *IN_PARAMETERS) | LOST_HOST)
def test_what_a_connectors_constructor_raises_shows_no_password(
    kind: type[Exception], url: str
) -> None:
    if not in_text(url):
        return
    seen: list[str] = []
    with shown_to(seen):
        build_worker(LlmArgs("model", KvCacheConfig(), None, (), b""), _broken(kind, url))
    assert seen[0].startswith("Broken could not be built: ")
    assert "no answer from '" in seen[0]
    assert not [piece for piece in PIECES for text in seen if piece in text], seen


def test_what_a_connectors_module_raises_shows_no_password(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, error in enumerate(("ImportError", "ValueError")):
        module = f"unreachable_connector_{number}"
        source = f"raise {error}('no answer from redis://me:secret@host:6379')"
        (tmp_path / f"{module}.py").write_text(source)
        seen: list[str] = []
        with shown_to(seen):
            named(module, seen)
        assert seen[0].endswith(f"{error}: no answer from redis://me:***@host:6379")
        assert not [text for text in seen if "secret" in text]


@given(parts=st.tuples(*[st.sampled_from(SEPARATORS)] * 2), times=st.integers(0, 2))
@pytest.mark.parametrize("kind", [list, tuple, bytes, dict])
def test_of_a_url_that_is_no_text_the_type_alone_is_shown(
    kind: type, parts: tuple[str, str], times: int
) -> None:
    password = PIECES[0] + parts[0] + PIECES[1] + parts[1] + PIECES[2]
    tier = f"redis://user:{password}@127.0.0.1:1"
    for _ in range(times):
        tier = quote(tier, safe="")
    url = f"tiered:?tiers=memory:,{tier}"
    given: object = {"url": url}
    if kind is not dict:
        given = url.encode() + b"\xff" if kind is bytes else kind([url])
    for make in (
        lambda: KvCacheConnectorConfig(url=given),
        lambda: KvCacheConnectorConfig.given("connector", {"url": given}),
        lambda: setattr(KvCacheConnectorConfig(), "url", given),
    ):
        with pytest.raises(ConfigurationError) as raised:
            make()
        assert not any(piece in str(raised.value) for piece in PIECES), str(raised.value)
    with pytest.raises(ConfigurationError, match=rf"url \(a {kind.__name__}\)"):
        KvCacheConnectorConfig(url=given)


@pytest.mark.parametrize("arguments", [("ls",), ("stats", "--json"), ("copy", "{}"), ()])
@settings(max_examples=30)
@given(url=urls(*WITHOUT_SLASHES[:2], *IN_PARAMETERS[1:3], IN_LOCATION[9]) | LOST_HOST)
def test_the_command_line_shows_no_password(arguments: tuple[str, ...], url: str) -> None:
    capture = pytest.MonkeyPatch()
    seen: list[str] = []
    with capture.context() as patch:
        patch.setattr("sys.stderr", _Written(seen))
        patch.setattr("sys.stdout", _Written(seen))
        with suppress(SystemExit):
            main([one.format(url) for one in arguments] + ([url] if url else []))
    assert not [piece for piece in PIECES if piece in "".join(seen)], seen


class _Written(list[str]):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.write = seen.append

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@host:6379/0?ttl=7d", "redis://me:***@host:6379/0?ttl=7d"),
        ("redis://secret@host", "redis://***@host"),
        ("redis://me:sec/ret@host/0", "redis://me:***@host/0"),
        ("redis://me:sec@ret@host", "redis://me:***@host"),
        ("redis://host:6379?passwd=secret&ttl=1d", "redis://host:6379?passwd=***&ttl=1d"),
        ("redis://host?password=sec&ret=1", "redis://host?password=***&***"),
        ("redis://me:secret", "redis://me:***"),
        ("redis://[::1]:6379,host/0", "redis://[::1]:6379,host/0"),
        ("s3://b/p?endpoint_url=http://me:x@h:9", "s3://b/p?endpoint_url=http://me:***@h:9"),
        ("tiered:?tiers=memory:,redis://:x@h", "tiered:?tiers=memory:,redis://:***@h"),
        ("disk:///mnt/@home/kv?capacity=1GiB", "disk:///mnt/@home/kv?capacity=1GiB"),
        ("disk:kv@home", "disk:kv@home"),
        ("/var/cache/kv", "/var/cache/kv"),
        ("", ""),
    ],
)
def test_what_holds_no_password_reads_as_it_was_written(url: str, shown: str) -> None:
    assert without_passwords(url) == shown


def test_every_documented_parameter_but_passwords_is_shown() -> None:
    docs = Path(__file__).parents[2] / "docs"
    lines = (docs / "stores.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    names = {name for cell in cells for name in cell.split("`")[1::2] if name.isidentifier()}
    assert {"capacity", "endpoint_url", "sentinel_password", "write"} <= names
    hidden = {name for name in names if "***" in str(StoreUrl("x", query={name: "x:"}))}
    assert hidden == {"sentinel_password"}


def test_an_at_sign_that_may_end_a_password_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match="%2F for '/'"):
        StoreUrl.parse("redis://me:sec/ret@host")
    assert StoreUrl.parse("s3://bucket/a@b").path == "/a@b"
    assert StoreUrl.parse("redis://me:sec%2Fret@host").location == "me:sec%2Fret@host"


def test_log_lines_of_libraries_show_no_password_on_the_command_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    main(["-v", "ls", "memory:"])
    logging.getLogger("library").warning("asks %s", "http://me:secret@host:9000/bucket")
    try:
        asyncio.run(_fail("http://me:secret@host:9000/bucket"))
    except OSError:
        logging.getLogger("library").exception("failed")
    told = capsys.readouterr().err
    assert "asks http://me:***@host:9000/bucket" in told
    assert "secret" not in told


async def _fail(url: str) -> None:
    raise OSError(f"no answer from {url}")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "piece", ["x", "9", "a:", "a://", "password", "passwordx=", "@", "a@", "://", "a://b?c&", "\n"]
)
def test_what_a_client_writes_takes_no_longer_than_it_is_long(piece: str) -> None:
    text = piece * (10_000 if len(piece) > 2 else 200_000)
    for hostile in (text, f"redis://{text}", f"redis://h?password={text}"):
        text_without_passwords(hostile)
        assert len(shown(hostile)) < 100
    assert nearest(text, ["disk", "memory"]) == "valid are disk, memory"
