"""The page in a real browser: what it shows, what it never does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import server_child
from headless import BROWSER, Page, browser
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, running, wait_until
from stored_blocks import fill, prompt_chain

from kvconnect.cli.main import main
from kvconnect.digest import model_digest
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.keys import Namespace, model_tag, salt_tag

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no chromium here; Debian's package of that name has it"
)

HOSTILE = (
    "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script> & <b>all</b> of it."
)
SALT = "the-salt-of-acme"


@pytest.fixture(scope="module")
def shown(model, folder, url) -> Iterator[ServerProcess]:
    """A server with a page, which answered a few prompts."""
    keys = ("--admin-key", "of-the-admin", "--metrics-key", "of-prometheus")
    arguments = ("--store", url, "--page", "--lookup-timeout", "60s", "--no-overlap-loads", *keys)
    with running(model, folder / "output", *arguments) as one:
        for text, salt in ((HOSTILE * 2, None), (HOSTILE * 2, SALT), (HOSTILE * 2 + " More", None)):
            for _ in range(2):
                body = {"model": "tiny", "prompt": text, "max_tokens": 1, "cache_salt": salt}
                assert one.post(body)[0] == 200
        # Once more, from the store.
        admin = {"Authorization": "Bearer of-the-admin"}
        wait_until(
            lambda: one.raw(b"", "/reset_prefix_cache", headers=admin)[0] == 200, "all is saved"
        )
        assert one.post({"model": "tiny", "prompt": HOSTILE * 2, "max_tokens": 1})[0] == 200
        yield one


@pytest.fixture(scope="module")
def chromium(folder) -> Iterator[Page]:
    with browser(folder) as page:
        yield page


@pytest.fixture
def page(chromium, shown) -> Page:
    """The page of that server, opened anew by an operator, who has entered the metrics key."""
    chromium.open(f"{shown.url}/page")
    assert "the server's metrics key are needed" in chromium.text()
    chromium.fill("api-key", "of-prometheus")
    chromium.wait("byId('figure-prompt')")
    chromium.requests.clear()
    return chromium


def metrics(server) -> dict[tuple[str, ...], float]:
    """All samples of a scrape, by their name and the values of labels in the order of these."""
    headers = {"Authorization": "Bearer of-prometheus"}
    _, text, _ = server.raw(b"", "/metrics", method="GET", headers=headers)
    return {
        (
            one.name,
            *(value for name, value in sorted(one.labels.items()) if name != "engine"),
        ): one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
    }


def whole(number: float) -> str:
    return f"{round(number):,}"


def listed(page: Page) -> None:
    """Lists the store, as a click on the button does."""
    page.run("byId('list').disabled || byId('list').click()")
    page.wait("byId('tree-rows').rows.length")


def open_everything(page: Page) -> None:
    """Opens every branch."""
    closed = "document.querySelector('#tree-rows button[aria-expanded=false]:enabled')"
    while page.run(f"{closed} !== null"):
        page.run(f"{closed}.click()")
        page.wait("!document.querySelector('#tree-rows button:disabled')")


def test_what_it_shows_is_what_the_metrics_say(page, shown):
    told = metrics(shown)
    outcomes = {
        key[1]: value for key, value in told.items() if key[0] == "kvconnect_prompt_tokens_total"
    }
    prompts = sum(outcomes.values())
    hits = {key[1]: value for key, value in told.items() if key[0] == "kvconnect_hit_tokens_total"}
    assert prompts > 500
    assert min(hits["device"], hits["store"]) > 100
    text = {
        name: page.run(f"byId('figure-{name}').innerText")
        for name in ("hit", "ceiling", "prompt", "reused", "lost", "requests")
    }
    ceiling = told["kvconnect_ceiling_tokens_total",]
    kept = {"reused", "new", "unreached", "unexplained"}
    lost = sum(value for name, value in outcomes.items() if name not in kept)
    assert text == {
        "hit": f"{100 * sum(hits.values()) / prompts:.1f} %",
        "ceiling": f"{100 * ceiling / prompts:.1f} %",
        "prompt": whole(prompts),
        "reused": whole(sum(hits.values())),
        "lost": whole(lost),
        "requests": whole(told["kvconnect_requests_total",]),
    }
    *rows, all_of = page.table("outcome-rows")
    assert {row[0]: row[2] for row in rows} == {
        name: whole(value) for name, value in outcomes.items() if value
    }
    assert (all_of[0], all_of[2]) == ("all", whole(prompts))
    device, store = page.table("tier-rows")
    assert (device[0], device[2]) == ("device", whole(hits["device"]))
    free, used = (told["kvconnect_device_blocks", state] for state in ("free", "used"))
    assert device[1].strip() == f"{whole(used)} of {whole(used + free)} blocks in use"
    (place,) = (key[1:] for key in told if key[0] == "kvconnect_store_capacity_bytes")
    assert store[0].split("\n") == ["Disk", place[0]]
    assert store[2] == whole(hits["store"])
    exact = page.run("document.querySelector('#tier-rows .used').title")
    assert exact == whole(told["kvconnect_store_used_bytes", *place]) + " bytes"
    assert store[6] == (
        f"{whole(told['kvconnect_store_misses_total', *place])} of "
        f"{whole(told['kvconnect_store_calls_total', 'lookup', *place])}"
    )
    assert store[8] == "in use"


def test_tenants_are_those_of_stats_and_the_tree_opens_branch_by_branch(page, url, capsys):
    listed(page)
    assert main(["stats", url, "--by", "tenant", "--json"]) == 0
    tenants = json.loads(capsys.readouterr().out)["tenants"]
    rows = page.table("tenant-rows")
    assert [row[0] for row in rows] == [
        one["name"] or f"tenant {at}" for at, one in enumerate(tenants, 1)
    ]
    assert [row[2] for row in rows] == [whole(one["blocks"]) for one in tenants]
    assert [row[5] for row in rows] == [whole(one["tokens_saved"]) for one in tenants]
    spaces = page.table("tree-rows")
    assert sorted(row[1] for row in spaces) == sorted(row[2] for row in rows)
    page.run("document.querySelector('#tree-rows button').click()")
    page.wait(f"byId('tree-rows').rows.length > {len(spaces)}")
    page.run("document.querySelector('#tree-rows button').click()")
    assert page.table("tree-rows") == spaces


def test_markup_in_a_prompt_is_text_and_no_request_leaves_the_host(page, shown):
    listed(page)
    open_everything(page)
    assert not [one for one in page.requests if "/v1/" in one], "without the admin key"
    page.fill("admin-key", "of-the-admin")
    page.wait("byId('tenant-rows').innerText.length && byId('tree-rows').rows.length")
    page.wait(f"byId('tenant-rows').innerText.includes({salt_tag(SALT).hex()!r})")
    page.wait("byId('tree-rows').rows.length")
    open_everything(page)
    text = page.run("byId('tree-rows').innerText")
    assert HOSTILE[:60] in text
    assert "key " in text
    assert page.run("document.querySelectorAll('img, iframe, main script').length") == 0
    assert page.run("typeof window.hacked") == "undefined"
    page.run("refresh()")
    assert not [one for one in page.requests if not one.startswith(f"{shown.url}/")]
    assert not [one for one in page.refused if "Security" in one]


@pytest.mark.parametrize(
    "script",
    [
        "fetch('http://127.0.0.1:9/x')",
        "fetch('http://example.com/x', {mode: 'no-cors'})",
        "new Promise((_, no) => Object.assign(new Image(), {onerror: no, src: '//127.0.0.1:9/x'}))",
        "(async () => { document.body.innerHTML = '<b>x</b>'; })()",
        "navigator.sendBeacon('http://127.0.0.1:9/x') ? Promise.resolve() : Promise.reject()",
    ],
)
def test_whatever_the_script_did_the_browser_would_refuse_it(page, script):
    page.refused.clear()
    page.run(f"{script}.then(() => 'done', () => 'refused')")
    page.wait("true")
    assert any("Security Policy" in one or "Trusted" in one for one in page.refused), page.refused
    assert not [one for one in page.requests if "example.com" in one]


def test_a_server_that_wants_its_api_key_gets_it(model, folder, chromium):
    arguments = ("--page", "--api-key", "of-clients")
    with running(model, folder / "with-key", *arguments) as one:
        chromium.open(f"{one.url}/page")
        assert "enter a key of this server" in chromium.text()
        assert chromium.run("byId('keys').open")
        chromium.fill("api-key", "of-clients")
        chromium.wait("byId('figure-prompt')")
        assert chromium.run("byId('figure-prompt').innerText") == "0"
        assert chromium.run("byId('store').hidden")


def test_a_store_alone(model, folder, chromium):
    store = f"disk:{folder}/alone?capacity=64MiB"
    text = Tokenizer.of(model).encode("Hello <b>you</b>")
    fill(store, prompt_chain(text, size=64, model=model_tag(model_digest(model)) + bytes(16)))
    for number in range(3):
        fill(store, prompt_chain([65, 66, 67, 68, 70 + number], namespace=Namespace(SALT)))
    arguments = (store, str(model), "--admin-key", "of-the-admin")
    with running(None, folder / "alone-output", *arguments, serve=server_child.page) as one:
        chromium.open(f"{one.url}/page")
        chromium.wait("byId('tree-rows').rows.length")
        assert chromium.run("byId('hits').hidden")
        ((tier, holds, blocks, _),) = chromium.table("tier-rows")
        assert (tier.split("\n")[0], blocks) == ("Disk", "5")
        assert "of 64.0 MiB" in holds
        assert "tenant 1" in chromium.text()
        chromium.fill("admin-key", "of-the-admin")
        chromium.wait(f"byId('tenant-rows').innerText.includes({salt_tag(SALT).hex()!r})")
        chromium.wait("byId('tree-rows').rows.length")
        open_everything(chromium)
        assert "token ids 65 66 67 68" in chromium.text()
        assert "Hello <b>you</b>" in chromium.text()
        assert one.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_store_of_a_million_blocks(folder, chromium):
    store = f"disk:{folder}/many?capacity=64MiB"
    fill(store, prompt_chain([1]))
    arguments = (store, "--admin-key", "of-the-admin")
    child = server_child.page_of_a_million_blocks
    with running(None, folder / "many-output", *arguments, serve=child) as one:
        chromium.open(f"{one.url}/page")
        chromium.wait("byId('listing').innerText.includes('blocks so far')")
        chromium.wait("byId('tree-rows').rows.length", deadline_s=600)
        assert "1,000,090 blocks" in chromium.run("byId('listing').innerText")
        rows = chromium.table("tree-rows")
        assert (len(rows), rows[0][1]) == (20, "50,045")
        chromium.run("document.querySelector('#tree-rows button').click()")
        chromium.wait("byId('tree-rows').rows.length === 21")
        chromium.run("document.querySelectorAll('#tree-rows button')[1].click()")
        chromium.wait("byId('tree-rows').rows.length === 21 + 51")
        assert "1,062 more" in chromium.text()
        chromium.run("document.querySelector('#tree-rows button.more').click()")
        chromium.wait("byId('tree-rows').rows.length === 21 + 101")
        assert "1,012 more" in chromium.text()
