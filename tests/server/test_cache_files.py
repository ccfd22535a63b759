"""Export and import over HTTP: streamed, continued, and nothing visible before the check."""

from __future__ import annotations

import http.client
import json
import resource
import tempfile
from contextlib import contextmanager

import pytest
from server_process import ServerProcess, running
from stored_blocks import damage, entries, fill, frames, prompt_chain

from kvconnect import PromptStore
from kvconnect.cli.main import main
from kvconnect.errors import BackendUnavailable, BadFrame, ConfigurationError
from kvconnect.keys import Namespace
from kvconnect.operations import remote
from kvconnect.operations.archive import ArchiveReader, ArchiveWriter, archive_id
from kvconnect.operations.export import Exported
from kvconnect.operations.saving import Saved
from kvconnect.server.errors import RequestRefused
from kvconnect.server.uploads import Uploads

KEY = "of-the-admin"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PROMPT = list(range(100, 122))
ALL = {"everything": True, "all_models": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def url(folder) -> str:
    return f"disk:{folder}/kv?capacity=64MiB"


@pytest.fixture(scope="module")
def server(model, folder, url) -> ServerProcess:
    keys = ("--admin-key", KEY, "--api-key", "of-clients", "--max-import", "1MiB")
    with running(model, folder / "output", "--store", url, *keys) as one:
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


@pytest.mark.parametrize("path", ["export", "import", f"import/{'0' * 32}"])
def test_the_admin_key_is_needed(server, path):
    for key in (None, "of-clients"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        status, answer, _ = server.post(ALL, f"/v1/cache/{path}", headers=headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_admin_key")


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
    assert "was made with a key" in capsys.readouterr().err
    assert main(["export", server.url, "--salt", "nobody", "-o", str(tmp_path / "none")]) == 3
    assert not list(tmp_path.glob("none*"))
    assert main(["export", server.url, "-o", str(tmp_path / "none")]) == 2
    assert "nothing says which blocks" in capsys.readouterr().err


def test_an_interrupted_export_goes_on(server, blocks, url, file, monkeypatch):
    plain, calls = ArchiveWriter.add, []

    def add(self, block):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        plain(self, block)

    monkeypatch.setattr(ArchiveWriter, "add", add)
    with pytest.raises(KeyboardInterrupt):
        export(server, file)
    assert not file.exists()
    done = export(server, file)
    assert (done.resumed, done.blocks) == (4, 12)
    assert len(calls) == 5 + 8, "only the rest was sent"
    assert read(file) == values(url, blocks)


def test_a_part_of_other_blocks_is_begun_anew(server, blocks, url, file):
    export(server, file)
    file.rename(f"{file}.part")
    done = export(server, file, {"salt": "mine"})
    assert (done.resumed, done.blocks) == (0, 6)
    assert read(file) == values(url, blocks[:6])


def test_a_connection_that_is_cut_leaves_no_whole_file(server, blocks, file, monkeypatch):
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


def test_bad_blocks_are_left_out_and_said(server, blocks, folder, file):
    damage(folder / "kv", blocks[2])
    with pytest.raises(BadFrame, match="1 blocks are bad or were dropped"):
        export(server, file)
    assert (export.done.bad, export.done.blocks) == (1, 11)
    assert len(read(file)) == 11


@pytest.mark.parametrize("skip", ["x", "AAAA", "AAAAAAAAAAA"])
def test_a_wrong_list_of_keys_is_refused(server, skip):
    body = {**ALL, "skip": skip}
    status, answer, _ = server.post(body, "/v1/cache/export", headers=ADMIN)
    assert (status, "skip: give the base64" in answer["error"]["message"]) == (400, True)


def test_a_client_that_leaves_ends_its_export(server, blocks, file):
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json"} | ADMIN
        connection.request("POST", "/v1/cache/export", json.dumps(ALL), headers)
        connection.getresponse().read(100)
        connection.close()
    assert export(server, file).blocks == 12


def test_a_changed_file_is_refused_and_nothing_is_saved(server, blocks, url, file):
    export(server, file)
    PromptStore(url).drop(everything=True)
    content = file.read_bytes()
    changes = [content[:-1], content[: len(content) // 2], content + b"\0"]
    for at in (33, 100, len(content) // 2, len(content) - 40):
        wrong = bytearray(content)
        wrong[at] ^= 1
        changes.append(bytes(wrong))
    for wrong in changes:
        file.write_bytes(wrong)
        with pytest.raises(BadFrame):
            send(server, file)
        assert not entries(url)
    file.write_bytes(content)
    assert send(server, file).blocks == 12


def test_an_interrupted_import_goes_on(server, blocks, url, file, monkeypatch):
    export(server, file)
    PromptStore(url).drop(everything=True)
    monkeypatch.setattr(remote, "_PIECE_NBYTES", 10_000)
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
    assert len(sent) == 1 + -(-file.stat().st_size // 10_000)


def test_pieces_are_refused_that_do_not_follow(server, blocks, file):
    export(server, file)
    name, kind = archive_id(file), {"Content-Type": "application/octet-stream"} | ADMIN
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
    assert uploads.received(one) == 0
    with pytest.raises(BackendUnavailable), uploads.taken(two):
        raise BackendUnavailable("the store fails")
    assert uploads.received(two) == 10, "it need not be sent again"
    with uploads.taken(two) as path:
        assert path.read_bytes() == b"y" * 10
        assert uploads.append(one, 0, b"z") == 1, "another one may come meanwhile"
    assert uploads.received(two) == 0
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
