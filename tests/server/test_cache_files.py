"""Export and import over HTTP: streamed, continued, and nothing visible before the check."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import tempfile
from contextlib import contextmanager

import pytest
from server_process import ServerProcess, running, wait_until
from stored_blocks import damage, entries, fill, frames, prompt_chain

from kvconnect import PromptStore
from kvconnect.cli.main import main
from kvconnect.errors import BackendUnavailable, BadFrame, ConfigurationError
from kvconnect.keys import Namespace
from kvconnect.operations import remote
from kvconnect.operations.archive import ArchiveReader, ArchiveWriter, part_of
from kvconnect.operations.result import Exported, Saved
from kvconnect.server import cache_files
from kvconnect.server.errors import RequestRefused
from kvconnect.server.uploads import Uploads

KEY = "of-the-admin"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PROMPT = list(range(100, 122))
ALL = {"everything": True, "all_models": True}


@pytest.fixture(autouse=True)
def pieces_fit(monkeypatch):
    monkeypatch.setattr(remote, "_PIECE_NBYTES", 4096)


@pytest.fixture(scope="module")
def server(model, folder, url) -> ServerProcess:
    keys = ("--admin-key", KEY, "--api-key", "of-clients")
    limits = ("--max-import", "1MiB", "--max-body", "8KiB")
    with running(model, folder / "output", "--store", url, *keys, *limits) as one:
        yield one


@pytest.fixture
def blocks(server, url):
    """What the server's store has; afterwards it is empty."""
    made = prompt_chain(PROMPT, namespace=Namespace("mine")) + prompt_chain(PROMPT)
    fill(url, made)
    yield made
    PromptStore(url).drop(everything=True)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.kv"


def read(path, key=b""):
    with ArchiveReader(path, key) as reader:
        return {one.key: bytes(one.data) for one in reader.blocks()}


def values(url, blocks):
    keys = [one.key for one in blocks]
    return dict(zip(keys, frames(url, keys), strict=True))


def export(server, file, body=ALL, **options):
    done = Exported()
    try:
        remote.export_by_server(server.url, body, file, done, admin_key=KEY, **options)
    finally:
        export.done = done
    return done


def send(server, file):
    done = Saved()
    remote.import_by_server(server.url, file, done, admin_key=KEY)
    return done


def test_the_answer_of_an_export_is_a_file_for_import(server, blocks, url, file, tmp_path):
    status, content, headers = server.raw({"salt": "mine"}, "/v1/cache/export", headers=ADMIN)
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert json.loads(headers["kvconnect-counts"])["blocks"] == 6
    file.write_bytes(content)
    target = f"disk:{tmp_path}/target?capacity=64MiB"
    assert PromptStore(target).import_(file).blocks == 6
    assert values(target, blocks[:6]) == values(url, blocks[:6])


def test_the_command_exports_and_imports_by_a_server(
    server, blocks, url, file, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVCONNECT_ADMIN_KEY", KEY)
    (tmp_path / "key").write_bytes(b"k" * 32)
    plain = ["export", server.url, "--salt", "mine", "--json", "-o"]
    assert main([*plain, str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["tokens"], found["complete"]) == (6, 22, True)
    before = values(url, blocks)
    keyed = str(tmp_path / "keyed.kv")
    assert main([*plain, keyed, "--key-file", str(tmp_path / "key")]) == 0
    PromptStore(url).drop(everything=True)
    capsys.readouterr()
    assert main(["import", server.url, str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["blocks"], found["present"], found["complete"]) == (6, 0, True)
    assert values(url, blocks[:6]) == {key: before[key] for key in values(url, blocks[:6])}
    assert main(["import", server.url, str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["present"] == 6
    assert main(["import", server.url, keyed]) == 2
    assert "was made with a key; a server does not have it" in capsys.readouterr().err
    assert main(["export", server.url, "--salt", "nobody", "-o", str(tmp_path / "none")]) == 3
    assert not list(tmp_path.glob("none*"))
    assert main(["export", server.url, "-o", str(tmp_path / "none")]) == 2
    assert "nothing says which blocks" in capsys.readouterr().err


def test_a_connection_that_is_cut_leaves_no_whole_file(server, blocks, url, file, monkeypatch):
    """A file that lacks its end is no file, and the next call goes on."""
    plain = http.client.HTTPResponse.readinto
    left = [40_000]

    def readinto(self, into):
        found = plain(self, memoryview(into)[: max(0, left[0])])
        left[0] -= found
        return found

    monkeypatch.setattr(http.client.HTTPResponse, "readinto", readinto)
    with pytest.raises(BackendUnavailable, match="ends too early"):
        export(server, file)
    monkeypatch.undo()
    assert not file.exists()
    assert export(server, file).resumed == 3
    assert read(file) == values(url, blocks)


def test_bad_blocks_are_left_out_and_said(server, blocks, folder, file):
    damage(folder / "kv", blocks[2])
    with pytest.raises(BadFrame, match="1 blocks are bad or were dropped"):
        export(server, file)
    assert (export.done.bad, export.done.blocks) == (1, 11)
    assert len(read(file)) == 11


@pytest.mark.parametrize(("skip", "expected"), [("x", 400), ("0" * 32, 404)])
def test_a_list_of_keys_that_was_not_sent_is_refused(server, skip, expected):
    body = {**ALL, "skip": skip}
    assert server.post(body, "/v1/cache/export", headers=ADMIN)[0] == expected


def test_a_list_of_keys_may_be_longer_than_a_body(server, blocks, url, file):
    writer = ArchiveWriter(part_of(file), b"")
    for one in [*blocks[:5], *prompt_chain(range(5000, 9400))]:  # 8.8 KiB of keys
        writer.add(one)
    writer.close()
    done = export(server, file)
    assert (done.resumed, done.blocks) == (0, 12), "others than wanted: it is begun anew"
    assert read(file) == values(url, blocks)


def slow_exports(server, number):
    """Clients that ask for an export and read nothing of it."""
    head = f"POST /v1/cache/export HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    body = json.dumps(ALL)
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(number):
        one = server.connect(receive_buffer=4096)
        one.sendall((head + body).encode())
        assert one.recv(12) == b"HTTP/1.1 200"
        yield one


def slow_senders(server):
    """Clients that send less than they announced."""
    for path in ("drop", "export", f"import/{'0' * 32}?offset=0"):
        kind = "application/octet-stream" if "offset" in path else "application/json"
        head = f"POST /v1/cache/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: 1000\r\n\r\n"
        for _ in range(3):
            one = server.connect()
            one.sendall(f'{head}{{"salt": '.encode())
            yield one


def test_slow_clients_hold_up_nothing_and_those_that_leave_end_their_exports(
    server, blocks, url, file
):
    fill(url, prompt_chain(range(20_000, 20_400), namespace=Namespace("long")))  # 1.2 MiB
    for _ in range(2):
        # One reader fewer than there are threads for exports.
        slow = [*slow_exports(server, 3), *slow_senders(server)]
        body = {"salt": "mine", "dry_run": True}
        status, answer, _ = server.post(body, "/v1/cache/drop", headers=ADMIN)
        assert (status, answer["blocks"]) == (200, 6)
        assert export(server, file).blocks == 112
        for one in slow:
            one.close()


async def pieces_of(pipe, content):
    loop = asyncio.get_running_loop()

    def write():
        with pipe.file as file:
            file.write(content)

    found = b""
    try:
        async for piece in pipe.pieces(loop.run_in_executor(None, write)):
            found += piece
    finally:
        pipe.close()
    return found


def test_a_client_that_reads_less_than_the_least_is_cut(monkeypatch):
    content = bytes(300_000)
    assert asyncio.run(pieces_of(cache_files._Pipe(60.0), content)) == content
    monkeypatch.setattr(cache_files, "_LEAST_NBYTES_PER_S", 1 << 60)
    assert asyncio.run(pieces_of(cache_files._Pipe(60.0), content)) == content
    with pytest.raises(RequestRefused, match="reads too slowly"):
        asyncio.run(pieces_of(cache_files._Pipe(0.0), content[:60_000]))


def test_a_changed_file_is_refused_and_nothing_is_saved(server, blocks, url, file):
    export(server, file)
    PromptStore(url).drop(everything=True)
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for wrong in (content[:-1], flipped):  # others: tests/cli/test_export.py
        file.write_bytes(wrong)
        with pytest.raises(BadFrame):
            send(server, file)
        assert not entries(url)
    file.write_bytes(content)
    assert send(server, file).blocks == 12


def test_an_interrupted_import_goes_on(server, blocks, url, file, monkeypatch):
    export(server, file)
    PromptStore(url).drop(everything=True)
    monkeypatch.setattr(remote, "_PIECE_NBYTES", 5_000)
    plain, sent = remote._Server.ask, []

    def ask(self, method, target, body=None, **options):
        if "offset" in target:
            sent.append(target)
            if len(sent) == 4:
                raise KeyboardInterrupt
        return plain(self, method, target, body, **options)

    monkeypatch.setattr(remote._Server, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        send(server, file)
    assert not entries(url)
    assert send(server, file).blocks == 12
    assert sent[3] == sent[4], "it goes on where it was"
    assert len(sent) == 1 + -(-file.stat().st_size // 5_000)


def test_pieces_are_refused_that_do_not_follow(server, blocks, file):
    export(server, file)
    with ArchiveReader(file, b"") as reader:
        name, kind = reader.id, {"Content-Type": "application/octet-stream"} | ADMIN
    path = f"/v1/cache/import/{name}"
    assert server.post(b"x", f"{path}?offset=5", headers=kind)[0] == 409
    assert server.post(b"x", f"{path}?offset=-5", headers=kind)[0] == 400
    assert server.post(b"x", f"{path}?offset={1 << 20}", headers=kind)[0] == 413
    assert server.post(b"x", "/v1/cache/import/x?offset=0", headers=kind)[0] == 400
    assert server.post(b"x", path, headers=ADMIN | {"Content-Type": "text/plain"})[0] == 415
    assert server.post(b"abc", f"{path}?offset=0", headers=kind)[1] == {"received": 3}
    assert server.post(b"bcd", f"{path}?offset=1", headers=kind)[1] == {"received": 4}
    status, answer, _ = server.post(b"x", f"{path}?offset=9", headers=kind)
    assert (status, "4 bytes are here" in answer["error"]["message"]) == (409, True)
    status, answer, _ = server.post({"file": name}, "/v1/cache/import", headers=ADMIN)
    assert (status, answer["error"]["code"]) == (400, "bad_file")
    status, answer, _ = server.post({"file": name}, "/v1/cache/import", headers=ADMIN)
    assert (status, answer["error"]["code"]) == (404, "no_such_file")


def test_a_file_with_a_key_is_refused_and_what_to_do_is_said(server, blocks, file, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    export(server, file, key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigurationError, match="give the URL of a store"):
        send(server, file)
    name = file.read_bytes()[16:32].hex()
    with remote._Server(server.url, KEY) as one, file.open("rb") as content:
        one.send(name, content)
    status, answer, _ = server.post({"file": name}, "/v1/cache/import", headers=ADMIN)
    assert (status, "export without a key" in answer["error"]["message"]) == (400, True)


def test_one_file_is_kept_and_none_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uploads = Uploads(100)
    one, two = "1" * 32, "2" * 32
    assert uploads.append(one, 0, b"x" * 60) == 60
    assert uploads.received(one) == 60
    assert not list(tmp_path.iterdir()), "nothing is left of it after a kill"
    with pytest.raises(RequestRefused, match="larger than 100"):
        uploads.append(one, 60, b"x" * 41)
    assert uploads.append(two, 0, b"y" * 10) == 10
    assert uploads.append(two, 10, b"y" * 30) == uploads.append(two, 0, b"y" * 40) == 40
    assert uploads.received(one) == 60
    assert uploads.append(two, 40, b"y") == 41
    assert uploads.received(one) == 0, "the other one took its room"
    assert uploads.append(two, 0, b"y" * 10) == 10
    with pytest.raises(BackendUnavailable), uploads.taken(two):
        raise BackendUnavailable("the store fails")
    assert uploads.received(two) == 10, "it need not be sent again"
    with uploads.taken(two) as path:
        assert path.read_bytes() == b"y" * 10
        assert uploads.append(one, 0, b"z") == 1, "another one may come meanwhile"
        for refused in (one, two):
            with pytest.raises(RequestRefused, match="being used"):
                uploads.append(refused, 0, b"z" * 91)
    assert uploads.received(two) == 0
    uploads.close()


def test_abandoned_files_end_by_age_and_the_oldest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    now = [100.0]
    uploads = Uploads(100, idle_s=10.0, clock=lambda: now[0])
    one, two, three = (digit * 32 for digit in "123")
    uploads.append(one, 0, b"x" * 40)
    now[0] = 105.0
    uploads.append(two, 0, b"x" * 40)
    now[0] = 106.0
    uploads.append(one, 40, b"x" * 10)  # its last piece counts
    uploads.append(three, 0, b"x" * 50)
    assert [uploads.received(name) for name in (one, two, three)] == [50, 0, 50]
    now[0] = 115.9
    uploads._end_idle()
    assert [uploads.received(name) for name in (one, three)] == [50, 50]
    now[0] = 116.0
    with uploads.taken(three):
        uploads._end_idle()
        assert uploads.received(one) == 0
    for number in range(20):
        uploads.append(f"{number:032x}", 0, b"x")
    assert sum(uploads.received(f"{number:032x}") for number in range(20)) == 16
    uploads.close()


def test_the_age_is_kept_without_another_request(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uploads = Uploads(100, idle_s=0.05)
    for name in ("1" * 32, "2" * 32):
        uploads.append(name, 0, b"x" * 10)
    wait_until(lambda: not uploads._files, "both are dropped")
    assert uploads._timer is None
    uploads.append("1" * 32, 0, b"x" * 10)

    def fail() -> None:
        with uploads.taken("1" * 32):
            wait_until(lambda: uploads._timer is None, "its time is over while it is used")
            raise BackendUnavailable("the store fails")

    with pytest.raises(BackendUnavailable):
        fail()
    wait_until(lambda: not uploads._files, "it is dropped after that")
    uploads.close()


@contextmanager
def files_of_at_most(nbytes):
    """A disk that takes no more of a file: the system refuses it as it does on a full one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_the_file_and_takes_one_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uploads, name = Uploads(1 << 20), "1" * 32
    with files_of_at_most(4096):
        for _ in range(2):
            assert uploads.append(name, 0, b"x" * 2000) == 2000
            with pytest.raises(RequestRefused, match="no room for the file: File too large"):
                uploads.append(name, 2000, b"x" * 3000)
            assert uploads.received(name) == 0
    assert uploads.append(name, 0, b"x" * 5000) == 5000
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RequestRefused, match="no room for the file: No such file"):
        uploads.append("2" * 32, 0, b"x")
    uploads.close()


def test_a_url_or_key_that_is_wrong(server, file):
    with pytest.raises(ConfigurationError, match="is no URL"):
        remote.export_by_server("ftp://x", ALL, file, Exported(), admin_key=KEY)
    with pytest.raises(ConfigurationError, match="admin key are needed"):
        remote.export_by_server(server.url, ALL, file, Exported(), admin_key="x")
