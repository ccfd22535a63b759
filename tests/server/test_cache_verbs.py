"""The verbs on stored prompts over HTTP: who may, what they do, and how they end."""

from __future__ import annotations

import http.client
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, running, wait_until

from kvconnect import PromptStore
from kvconnect.cli.main import main

ADMIN = {"Authorization": "Bearer of-the-admin"}
PROMPT = list(range(100, 170))
OTHER = list(range(200, 250))
VERBS = ("warm", "drop", "pin", "unpin", "prefetch")
FILES = ("export", "import", f"import/{'0' * 32}")


@pytest.fixture(scope="module")
def admin(model, folder, url) -> ServerProcess:
    """A server with a store, an API key and an admin key."""
    arguments = (
        "--store",
        url,
        "--lookup-timeout",
        "60s",
        "--no-overlap-loads",
        "--max-queue",
        "8",
    )
    keys = ("--api-key", "of-clients", "--admin-key", "of-the-admin")
    with running(model, folder / "output", *arguments, *keys) as one:
        yield one


@pytest.fixture
def ask(admin):
    """Asks for a verb; returns the counts."""

    def post(verb: str, **body: object) -> dict[str, object]:
        status, answer, _ = admin.post(body, f"/v1/cache/{verb}", headers=ADMIN)
        assert status == 200, answer
        return answer

    yield post
    post("drop", everything=True, all_models=True)


def figure(admin, name: str) -> float:
    """The sum of a metric's samples."""
    _, text, _ = admin.raw(b"", "/metrics", headers=ADMIN, method="GET")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    )


@pytest.mark.parametrize("verb", [*VERBS, *FILES])
@pytest.mark.parametrize("key", [None, "of-clients", "of-the-admi", "of-the-admin2"])
def test_the_admin_key_is_needed(admin, verb, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    status, answer, _ = admin.post({"everything": True}, f"/v1/cache/{verb}", headers=headers)
    assert (status, answer["error"]["code"]) == (401, "invalid_admin_key")


def test_the_admin_key_is_none_of_clients(admin):
    status, answer, _ = admin.post({"prompt": "x"}, headers=ADMIN)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("verb", [*VERBS, "nothing"])
def test_a_server_without_an_admin_key_refuses_verbs(server, verb):
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
        status, answer, _ = server.post({"everything": True}, f"/v1/cache/{verb}", headers=headers)
        assert (status, answer["error"]["code"]) == (403, "no_admin_key")


def test_warm_computes_and_saves_what_is_missing_and_skips_the_rest(admin, ask, url):
    first = ask("warm", prompts=[PROMPT])
    assert first["complete"]
    assert (first["blocks"], first["tokens"], first["missing"], first["present"]) == (5, 69, 1, 0)
    assert first["bytes"] == PromptStore(url).drop(everything=True, dry_run=True).bytes
    before = figure(admin, "kvconnect_prompt_tokens_total")
    again = ask("warm", prompts=[PROMPT, OTHER])
    assert (again["blocks"], again["tokens"], again["present"]) == (4, 49, 5)
    found = PromptStore(url).drop(prompts=[PROMPT, OTHER], dry_run=True)
    assert (found.tokens, found.missing) == (69 + 49, 2)
    assert figure(admin, "kvconnect_prompt_tokens_total") - before == len(OTHER)


def test_warm_is_under_the_salt_of_each_prompt(ask, url):
    ask("warm", prompts=[PROMPT, OTHER], salt=["mine", "yours"])
    assert PromptStore(url).drop(salt="mine", dry_run=True).tokens == 69
    assert PromptStore(url).drop(salt="yours", dry_run=True).tokens == 49
    assert ask("drop", salt="mine")["tokens"] == 69
    assert PromptStore(url).drop(salt="yours", dry_run=True).tokens == 49


def test_drop_takes_the_blocks_of_the_engine_too(admin, ask):
    ask("warm", prompts=[PROMPT], salt="mine")
    found = ask("drop", salt="mine")
    assert (found["blocks"], found["engine_cleared"]) == (5, True)
    assert ask("warm", prompts=[PROMPT], salt="mine")["blocks"] == 5
    assert ask("drop", salt="mine", dry_run=True)["blocks"] == 5
    assert ask("drop", salt="mine")["blocks"] == 5


@pytest.mark.parametrize("body", [{}, {"keys": ["xyz"]}, {"everything": True}])
def test_a_drop_that_is_refused_leaves_the_engine_its_blocks(admin, ask, body):
    request = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "reused"}
    headers = {"Authorization": "Bearer of-clients"}
    admin.post(request, headers=headers)
    assert admin.post(body, "/v1/cache/drop", headers=ADMIN)[0] == 400
    before = figure(admin, "kvconnect_loaded_blocks_total")
    _, answer, _ = admin.post(request, headers=headers)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    assert figure(admin, "kvconnect_loaded_blocks_total") == before


def test_the_blocks_of_the_served_model_are_dropped_by_its_name(admin, ask, url):
    ask("warm", prompts=[PROMPT])
    headers = {"Authorization": "Bearer of-clients"}
    _, text, _ = admin.raw(b"", "/v1/models", headers=headers, method="GET")
    served = json.loads(text)["data"][0]["id"]
    assert ask("drop", everything=True, model=served, dry_run=True)["blocks"] == 5


def test_pin_and_unpin(ask, url):
    ask("warm", prompts=[PROMPT])
    assert ask("pin", prompts=PROMPT, for_s=3600)["blocks"] == 5
    assert PromptStore(url).unpin(everything=True).blocks == 5
    ask("pin", prompts=PROMPT)
    assert ask("unpin", prompts=PROMPT)["blocks"] == 5
    assert ask("unpin", prompts=PROMPT)["blocks"] == 0


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("drop", {}, "nothing says which blocks"),
        ("drop", {"everythin": True}, "did you mean 'everything'"),
        ("drop", {"for_s": 3, "everything": True}, "unknown field 'for_s'"),
        *(
            (verb, {"everything": True}, "give the model whose blocks are meant; or all_models")
            for verb in VERBS
        ),
        ("drop", {"all_models": True, "salt": "mine"}, "all_models: only with everything"),
        ("pin", {"for_s": 0, "everything": True}, "for_s"),
        ("pin", {"keys": ["xyz"]}, "is no key"),
        ("warm", {"everything": True, "all_models": True}, "give prompts or messages"),
        ("warm", {"prompts": [[1] * 5000]}, "5000"),
        ("prefetch", {"salt": "x"}, "DiskBackend has no faster tier"),
        ("drop", {"salt": "", "everything": False}, "salt"),
        ("drop", {"model": "other", "everything": True}, "is not served here"),
    ],
)
def test_refusals(admin, verb, body, message):
    status, answer, _ = admin.post(body, f"/v1/cache/{verb}", headers=ADMIN)
    assert status == (404 if "model" in body else 400), answer
    assert message in answer["error"]["message"]


def test_a_stream_ends_with_the_counts(admin):
    body = {"prompts": [PROMPT], "stream": True}
    status, text, _ = admin.raw(body, "/v1/cache/warm", headers=ADMIN)
    *_, last, end = text.decode().split("\n\n")[:-1]
    assert (status, end) == (200, "data: [DONE]")
    assert json.loads(last.removeprefix("data: "))["complete"]
    body = {"prompts": [[1] * 5000], "stream": True}
    status, text, _ = admin.raw(body, "/v1/cache/warm", headers=ADMIN)
    assert "error" in json.loads(text.decode().split("\n\n")[-3].removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
def test_a_verb_whose_client_leaves_ends_and_is_repeated(admin, ask, stream):
    prompts = [[one, *[7] * 1500] for one in range(60)]
    connection = http.client.HTTPConnection("127.0.0.1", admin.port, timeout=60)
    headers = {"Content-Type": "application/json"} | ADMIN
    body = json.dumps({"prompts": prompts, "stream": stream})
    connection.request("POST", "/v1/cache/warm", body, headers)
    wait_until(lambda: figure(admin, "kvconnect_live_requests") > 0, "the warm runs")
    connection.close()
    found = ask("warm", prompts=prompts[:1])
    assert found["complete"], "the one before has ended: verbs take turns"
    # Aborted ones end with the engine's step, which a short verb need not wait for.
    wait_until(lambda: figure(admin, "kvconnect_live_requests") == 0, "its requests end")
    assert ask("drop", prompts=prompts, dry_run=True)["missing"] > 60
    assert ask("warm", prompts=prompts[:3])["complete"]
    assert "Traceback" not in admin.said()


def test_the_command_warms_by_a_server(admin, ask, capsys, monkeypatch, tmp_path):
    (tmp_path / "lines").write_text(
        json.dumps({"messages": [{"role": "user", "content": "one"}], "cache_salt": "chat"})
        + "\n"
        + json.dumps({"prompt_token_ids": PROMPT, "cache_salt": "ids"})
        + "\n"
        + json.dumps("and a text, without a salt")
    )
    command = ["warm", "--server", admin.url, "--jsonl", str(tmp_path / "lines"), "--json"]
    monkeypatch.setenv("KVCONNECT_ADMIN_KEY", "of-the-admin")
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"]
    assert ask("drop", salt="ids", dry_run=True)["tokens"] == 69
    assert ask("drop", salt="chat", dry_run=True)["tokens"] > 0
    assert ask("drop", prompts="and a text, without a salt", dry_run=True)["tokens"] > 0
    assert main(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["blocks"], again["present"]) == (0, found["blocks"])
    monkeypatch.setenv("KVCONNECT_ADMIN_KEY", "of-nobody")
    assert main(command) == 2
    assert "admin key are needed" in capsys.readouterr().err
