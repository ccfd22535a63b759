"""A generation's place among those that are answered, without a server around it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvconnect.server.admission import Admission
from kvconnect.server.cache_files import _Export, _ExportEndpoint
from kvconnect.server.endpoint import GenerationEndpoint, Service
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
        settings = ServerSettings(model_names=("tiny",))
        service = Service(llm, settings, admission, threads)
        endpoint = GenerationEndpoint(kind, lambda *_: None, service)
        assert asyncio.run(run()) == (0, 2)
    assert admission.idle
    assert submitted == [llm], "the second one was not begun any more"
    assert aborted == [1]


@pytest.mark.timeout(20)
def test_a_client_that_leaves_before_its_export_is_sent_frees_the_thread_of_the_verbs():
    """The thread waits for a reader of the pipe, and no verb would ever run again."""
    left, written = threading.Event(), []

    class Endpoint(_ExportEndpoint):
        def _perform(self, wanted, run, work):
            work(SimpleNamespace(export=self.export))

        def export(self, sink, **_):
            sink.begun(1)
            left.wait(10)
            with pytest.raises(BrokenPipeError):
                sink.file.write(bytes(1 << 20))
            written.append(1)

    async def run():
        messages = [{"type": "http.request", "body": b'{"everything": true, "all_models": true}'}]
        leaving = asyncio.Event()

        async def receive():
            if messages:
                return messages.pop()
            await leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.Event().wait()  # the client reads nothing

        class Leaving(Endpoint):
            async def _response(self, *arguments):
                answer = await super()._response(*arguments)
                leaving.set()
                return answer

        endpoint = Leaving(_Export, Service(None, settings, admission, threads))
        await endpoint({**SCOPE, "asgi": {"spec_version": "2.3"}}, receive, send)
        left.set()

    admission = Admission(2, 1 << 20)
    with ThreadPoolExecutor(1) as thread:
        threads = SimpleNamespace(parsing=thread, sending=thread)
        settings = ServerSettings(model_names=("tiny",))
        asyncio.run(run())
        assert thread.submit(lambda: 1).result(30) == 1
    assert written == [1]
