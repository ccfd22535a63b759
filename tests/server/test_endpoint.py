"""A generation's place among those that are answered, without a server around it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from kvconnect.server.admission import Admission
from kvconnect.server.endpoint import GenerationEndpoint
from kvconnect.server.settings import ServerSettings

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/",
    "headers": [(b"content-type", b"application/json")],
}


def test_a_client_that_leaves_keeps_its_place_until_its_prompt_is_let_go():
    """Else clients that come and leave fill memory with prompts that wait to become tokens."""
    submitted, aborted, go_on = [], [], threading.Event()
    llm = SimpleNamespace(max_seq_len=100)

    def submit(llm, _headers):
        submitted.append(llm)
        go_on.wait(60)
        return [SimpleNamespace(done=False, abort=lambda: aborted.append(1))]

    wanted = SimpleNamespace(
        model=None,
        completions=1,
        stream=False,
        submit=submit,
        answer=lambda *_: None,
        max_logprobs=lambda _: 0,
        kv_transfer_params=None,
    )
    kind = SimpleNamespace(parse=lambda body: wanted)
    admission = Admission(2, 1 << 20)

    async def come_and_leave():
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{}"}]

        async def receive():
            return messages.pop()

        await endpoint(SCOPE, receive, None)

    async def run():
        clients = [asyncio.create_task(come_and_leave()) for _ in range(2)]
        done, _ = await asyncio.wait(clients, timeout=0.2)
        held = admission.completions
        go_on.set()
        await asyncio.gather(*clients)
        return len(done), held

    with ThreadPoolExecutor(1) as thread:
        threads = SimpleNamespace(parsing=thread, tokenizing=thread)
        endpoint = GenerationEndpoint(
            kind, llm, ServerSettings(model_names=("tiny",)), admission, threads
        )
        assert asyncio.run(run()) == (0, 2)
    assert admission.idle
    assert submitted == [llm], "the second one was not begun any more"
    assert aborted == [1]
