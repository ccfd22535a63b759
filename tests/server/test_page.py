"""The page's file and what it asks for: who may see what, and how much at once."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from starlette.routing import Router
from stored_blocks import fill, prompt_chain

from kvconnect import PromptStore
from kvconnect.cli.main import main
from kvconnect.explain.outcome import LOST, Outcome
from kvconnect.keys import Namespace, salt_tag
from kvconnect.operations import listed_store
from kvconnect.prometheus.overview import Overview
from kvconnect.server.errors import RequestRefused
from kvconnect.server.http.gate import Gate
from kvconnect.server.page import cache_page, history, store_reader
from kvconnect.server.page.cache_page import CachePage, check_host
from kvconnect.server.page.history import History
from kvconnect.server.page.store_reader import ModelTexts, StoreReader
from kvconnect.server.settings import PageSettings

ADMIN = {"Authorization": "Bearer of-the-admin"}
CLIENT = {"Authorization": "Bearer of-clients"}
PROMPT = list(range(100, 122))
NAMES = {salt_tag("acme-secret"): "Acme"}
MODEL = b"m" * 32


class Letters:
    """A tokenizer that has a letter for each token."""

    def whole_text(self, tokens):
        return "".join(chr(60 + one % 26) for one in tokens)


@pytest.fixture
def url(tmp_path) -> str:
    url = f"disk:{tmp_path}/kv?capacity=64MiB"
    fill(url, prompt_chain(PROMPT, namespace=Namespace("acme-secret")))
    fill(url, prompt_chain([*PROMPT[:8], 7, 8, 9, 10]))
    fill(url, prompt_chain([*PROMPT[:8], 1, 2]))
    return url


@asynccontextmanager
async def asked(url=None, *, host="127.0.0.1", texts=None, of_server=False, **fields):
    settings = PageSettings(admin_key="of-the-admin", **fields)
    reader = None if url is None else StoreReader(url, NAMES, texts)
    with CachePage("title", settings, reader, of_server=of_server) as page:
        router = Router(page.routes(), redirect_slashes=False)
        app = Gate(router, settings, settings.admin_key, has_prompts=False)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            yield client


async def told(client, path, status=200, **more):
    answer = await client.get(path, **more)
    assert answer.status_code == status, answer.text
    assert status != 200 or answer.headers["cache-control"] == "no-store"
    return answer.json()


async def listing(client, start="/page/", **more):
    """Lists the store, and returns the answer once that is done."""
    found = await told(client, f"{start}listing?fresh=1", **more)
    while found["state"] == "listing":
        await asyncio.sleep(0.005)
        found = await told(client, f"{start}listing", **more)
    return found


async def branches(client, number, *, node=None, at=0, start="/page/", **more):
    below = "" if node is None else f"&node={node}"
    return await told(client, f"{start}branches?listing={number}&start={at}{below}", **more)


# ------------------------------------------------------------------------------------ the file


async def test_the_file_is_open_and_may_run_and_reach_nothing_else():
    async with asked(api_key="of-clients") as client:
        answer = await client.get("/page")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        rules = dict(one.strip().split(" ", 1) for one in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        for path in ("overview", "listing", "branches"):
            await told(client, f"/page/{path}", 401)
        assert (await client.get("/page/")).status_code == 401


def test_the_file_explains_every_outcome_and_knows_which_are_lost():
    text = (Path(cache_page.__file__).parent / "page.html").read_text(encoding="utf-8")
    meanings = re.search(r"const MEANINGS = \{(.*?)\n\};", text, re.DOTALL)[1]
    assert re.findall(r"^  (\w+):", meanings, re.MULTILINE) == [*map(str, Outcome), "unexplained"]
    kept = re.search(r"const NOT_LOST = new Set\(\[(.*?)\]\)", text)[1]
    assert set(re.findall(r"\w+", kept)) == {*Outcome, "unexplained"} - LOST


# ------------------------------------------------------------------------------------ the numbers


async def test_the_overview_of_a_store_is_what_it_says_of_itself(url):
    async with asked(url) as client:
        found = await told(client, "/page/overview")
    assert (found["title"], found["has_store"], found["history"]) == ("title", True, [])
    assert found["overview"]["engine"] is None
    (store,) = found["overview"]["stores"]
    listed = PromptStore(url).drop(everything=True, dry_run=True)
    assert (store["store"], store["blocks"]) == ("DiskBackend", listed.blocks)
    assert (store["used_bytes"], store["capacity_bytes"]) == (listed.bytes, 64 << 20)


async def test_the_overview_of_a_server_is_its_metrics_with_the_last_hour(monkeypatch):
    async with asked(of_server=True) as client:
        found = await told(client, "/page/overview")
        now = Overview.now()
    assert not found["has_store"]
    assert found["overview"] | {"at": 0} == now.as_json() | {"at": 0}
    *_, last = found["history"]
    assert last["prompt_tokens"] == now.prompt_tokens
    assert last["lost_tokens"] == now.lost_tokens


def test_the_history_has_a_sample_at_each_interval_and_is_bounded(monkeypatch):
    monkeypatch.setattr(history, "INTERVAL_S", 0.001)
    monkeypatch.setattr(history, "_SAMPLES", 5)
    kept = History()
    end = time.monotonic() + 30
    while len(kept.samples()) < 6:
        assert time.monotonic() < end
    first = kept.samples()[0]["at"]
    while kept.samples()[0]["at"] == first:
        assert time.monotonic() < end
    assert len(kept.samples()) == 6
    kept.close()
    assert kept.samples()[:-1] == kept.samples()[:-1]


async def test_a_server_without_a_store_says_so():
    async with asked(of_server=True) as client:
        for path in ("listing", "branches?listing=1"):
            found = await told(client, f"/page/{path}", 400)
            assert "this server has no store" in found["error"]["message"]


# ------------------------------------------------------------------------------------ the listing


async def test_nothing_is_listed_until_it_is_asked_for(url, monkeypatch):
    monkeypatch.setattr(store_reader, "list_store", None)
    async with asked(url) as client:
        found = await told(client, "/page/listing")
        assert (found["state"], "listing" in found) == ("none", False)
        await told(client, "/page/branches?listing=0", 409)


async def test_tenants_have_numbers_without_the_key_and_names_with_it(url):
    async with asked(url) as client:
        open_to_all = await listing(client)
        with_key = await told(client, "/v1/cache/listing", headers=ADMIN)
        await told(client, "/v1/cache/listing", 401)
        await told(client, "/v1/cache/listing", 401, headers=CLIENT)
    assert open_to_all["blocks"] == with_key["blocks"] == 6 + 4
    assert with_key["tenants"] == [
        {"tenant": at, "known": True} | one.as_json()
        for at, one in enumerate(PromptStore(url).tenants(NAMES), 1)
    ]
    assert [one["name"] for one in with_key["tenants"]] == ["Acme", "(no salt)"]
    assert [one["name"] for one in open_to_all["tenants"]] == [None, "(no salt)"]
    assert {one["digest"] for one in open_to_all["tenants"]} == {None}
    kept = [{**one, "name": 0, "digest": 0} for one in with_key["tenants"]]
    assert [{**one, "name": 0, "digest": 0} for one in open_to_all["tenants"]] == kept


async def test_tenants_are_bounded(url, monkeypatch):
    monkeypatch.setattr(cache_page, "_TENANTS", 1)
    async with asked(url) as client:
        found = await listing(client)
    assert (len(found["tenants"]), found["more_tenants"]) == (1, 1)


async def test_branches_open_level_by_level_without_reading_the_store(url, monkeypatch):
    async with asked(url) as client:
        number = (await listing(client))["listing"]
        monkeypatch.setattr(listed_store, "visiting", None)
        spaces = await branches(client, number)
        assert [row["tenant"] for row in spaces["rows"]] == [1, 2]
        (row,) = (await branches(client, number, node=spaces["rows"][1]["node"]))["rows"]
        assert (row["run_blocks"], row["blocks"], row["branches"]) == (2, 4, 2)
        below = await branches(client, number, node=row["node"])
        assert sorted(one["blocks"] for one in below["rows"]) == [1, 1]
        assert below["more"] == 0
        monkeypatch.setattr(cache_page, "_ROWS", 1)
        below = await branches(client, number, node=row["node"])
        assert (len(below["rows"]), below["more"]) == (1, 1)
        rest = await branches(client, number, node=row["node"], at=1)
        assert (len(rest["rows"]), rest["more"]) == (1, 0)


async def test_without_the_key_there_is_no_token_key_or_digest(url):
    async with asked(url, texts=ModelTexts(Letters(), "nowhere")) as client:
        found = await listing(client)
        texts = [(await client.get("/page/listing")).text]
        for space in (await branches(client, found["listing"]))["rows"]:
            for node in (None, space["node"]):
                below = "" if node is None else f"&node={node}"
                path = f"/page/branches?listing={found['listing']}{below}"
                texts.append((await client.get(path)).text)
                for row in (await told(client, path))["rows"]:
                    assert row["used_at"] % 60 == row["created_at"] % 60 == 0
    secrets = [
        entry.key.hex() for entry in prompt_chain(PROMPT, namespace=Namespace("acme-secret"))
    ]
    secrets += [salt_tag("acme-secret").hex(), Namespace("acme-secret").encode().hex(), "Acme"]
    for text in texts:
        assert "token" not in text.replace("tokens_saved", "")
        assert not [one for one in secrets if one in text or one[:16] in text]


async def test_with_the_key_there_are_tokens_and_the_text_of_the_own_model(url, monkeypatch):
    await asyncio.to_thread(fill, url, prompt_chain([3, 4], model=b"other" * 6 + b"ab"))
    texts = ModelTexts(Letters(), "nowhere")
    monkeypatch.setattr(store_reader, "model_prefix", lambda *_: MODEL.hex()[:32])
    more = {"start": "/v1/cache/", "headers": ADMIN}
    async with asked(url, texts=texts) as client:
        number = (await listing(client, **more))["listing"]
        rows = {}
        for space in (await branches(client, number, **more))["rows"]:
            assert (space["token_ids"], space["key"]) == ([], None)
            (row,) = (await branches(client, number, node=space["node"], **more))["rows"]
            rows[space["model"], space["tenant"]] = row
    own, other = MODEL.hex()[:16], (b"other" * 6).hex()[:16]
    acme = rows[own, 1]
    first = prompt_chain(PROMPT, namespace=Namespace("acme-secret"))[0]
    assert (acme["token_ids"], acme["text"]) == (PROMPT, Letters().whole_text(PROMPT))
    assert (acme["key"], acme["tokens"], acme["run_tokens"]) == (first.key.hex(), 22, 22)
    assert rows[own, 2]["token_ids"] == PROMPT[:8]
    assert (rows[other, 2]["token_ids"], rows[other, 2]["text"]) == ([3, 4], None)


async def test_tokens_that_no_tokenizer_knows_have_no_text(url, monkeypatch):
    class Strict:
        def whole_text(self, tokens):
            return [None, ""][tokens[0]]

    monkeypatch.setattr(store_reader, "model_prefix", lambda *_: "6d6d")
    assert ModelTexts(Strict(), "nowhere").text(MODEL, [1]) == ""
    assert ModelTexts(Strict(), "nowhere").text(MODEL, [2**31 - 1]) is None


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("listing=1&node=x", 400, "node: 'x' is no whole number"),
        ("listing=1&node=-1", 400, "is no whole number"),
        ("listing=1&node=\u0663", 400, "is no whole number"),
        ("listing=1&start=" + "9" * 40, 400, "is no whole number"),
        ("listing=1&node=999", 404, "is none of this listing"),
        ("listing=2&node=0", 409, "was listed again"),
        ("node=0", 409, "was listed again"),
    ],
)
async def test_wrong_questions(url, query, status, message):
    async with asked(url) as client:
        await listing(client)
        found = await told(client, f"/page/branches?{query}", status)
    assert message in found["error"]["message"]


async def test_a_store_is_listed_again_only_after_a_while(url, monkeypatch):
    async with asked(url) as client:
        first = await listing(client)
        await asyncio.to_thread(fill, url, prompt_chain([9, 9, 9]))
        again = await listing(client)
        assert again["listing"] == first["listing"] == 1
        assert 0 < again["fresh_in_s"] <= max(5.0, 10 * again["took_s"])
    monkeypatch.setattr(store_reader, "_LEAST_INTERVAL_S", 0.0)
    monkeypatch.setattr(store_reader, "_TIMES", 0.0)
    async with asked(url) as client:
        first = await listing(client)
        await asyncio.to_thread(fill, url, prompt_chain([8, 8, 8]))
        again = await listing(client)
        assert (again["listing"], again["blocks"]) == (2, first["blocks"] + 1)


async def test_several_who_ask_at_once_share_one_listing(url, monkeypatch):
    calls, true = [], store_reader.list_store

    def counted(*arguments):
        calls.append(arguments)
        return true(*arguments)

    monkeypatch.setattr(store_reader, "list_store", counted)
    async with asked(url) as client:
        found = await asyncio.gather(*(listing(client) for _ in range(5)))
    assert {one["listing"] for one in found} == {1}
    assert len(calls) == 1


async def test_several_who_want_the_numbers_at_once_ask_the_store_once(tmp_path, url, monkeypatch):
    """Those of a slow store would wait for each other's questions, one after the other."""
    plain, asked_for = store_reader.store_overview, []
    monkeypatch.setattr(
        store_reader, "store_overview", lambda url: asked_for.append(url) or plain(url)
    )
    for one, status in ((url, 200), (f"disk:{tmp_path}/nowhere", 400)):
        asked_for.clear()
        async with asked(one) as client:
            found = await asyncio.gather(*(client.get("/page/overview") for _ in range(8)))
            assert {answer.status_code for answer in found} == {status}
            assert asked_for == [one]


async def test_a_listing_that_fails_says_why_and_is_no_end(tmp_path, url):
    async with asked(f"disk:{tmp_path}/nowhere") as client:
        found = await listing(client)
        assert found["state"] == "failed"
        assert "there is none in" in found["message"]
        assert (await told(client, "/page/overview", 400))["error"]


async def test_a_listing_that_runs_ends_with_the_page(url, monkeypatch):
    async def for_ever(*_):
        await asyncio.sleep(1e6)

    monkeypatch.setattr(store_reader, "list_store", for_ever)
    async with asked(url) as client:
        found = await told(client, "/page/listing?fresh=1")
        assert found["state"] == "listing"


# ------------------------------------------------------------------------------------ who asks


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "[::1]", "pc"]
)
def test_an_address_or_the_own_name_is_meant_for_this_server(host):
    check_host(host, "pc")


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "a b"]
)
def test_another_name_is_refused(host):
    with pytest.raises(RequestRefused, match="give this machine's address"):
        check_host(host, "127.0.0.1")


async def test_a_name_that_leads_here_is_refused_unless_there_is_a_key():
    async with asked(of_server=True, host="evil.example") as client:
        await told(client, "/page/overview", 403)
    async with asked(of_server=True, host="evil.example", api_key="of-clients") as client:
        await told(client, "/page/overview", 401)
        await told(client, "/page/overview", headers=CLIENT)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_servers_cause_nothing(url, site, monkeypatch):
    monkeypatch.setattr(store_reader, "list_store", None)
    async with asked(url) as client:
        await told(client, "/page/listing?fresh=1", 403, headers={"Sec-Fetch-Site": site})
        await told(client, "/page/listing", headers={"Sec-Fetch-Site": "same-origin"})


async def test_a_page_without_an_admin_key_shows_no_text(url):
    settings = PageSettings()
    with CachePage("title", settings, StoreReader(url, {}), of_server=False) as page:
        app = Gate(Router(page.routes()), settings, settings.admin_key)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = await told(client, "/v1/cache/listing", 403, headers=ADMIN)
    assert found["error"]["code"] == "no_admin_key"


# ------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["serve", "m", "--tenants", "file"], 2, "--tenants: needs --page"),
        (["serve", "m", "--page", "--tenants", "no-file"], 2, "--tenants no-file"),
        (["page", "nowhere"], 2, "a scheme is needed"),
        (["page", "memory:"], 2, "from outside there is nothing in it"),
        (["page", "redis://127.0.0.1:1/0?timeout=200ms"], 4, "127.0.0.1:1"),
        (["page", "URL", "--model-revision", "x"], 2, "--model-revision: needs MODEL"),
        (["page", "URL", "no/model"], 2, "no/model"),
        (["page", "URL", "--host", "0.0.0.0"], 2, "set an API key"),
        (["page", "URL", "--admin-key", "a b"], 2, "admin_key"),
    ],
)
def test_wrong_options(url, capsys, command, code, message):
    assert main([url if word == "URL" else word for word in command]) == code
    assert message in capsys.readouterr().err
