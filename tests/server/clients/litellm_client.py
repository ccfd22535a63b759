"""litellm: completions, chats, streams and their counts."""

from __future__ import annotations

import asyncio
import sys

import litellm

url = sys.argv[1]
of = {"api_base": f"{url}/v1", "api_key": "none", "model": "openai/tiny"}
messages = [{"role": "user", "content": "What is a KV cache?"}]

litellm.telemetry = False
whole = litellm.completion(**of, messages=messages, max_tokens=8, temperature=0, logprobs=True)
assert whole.usage.completion_tokens, whole
text = whole.choices[0].message.content
stream = litellm.completion(
    **of,
    messages=messages,
    max_tokens=8,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
assert streamed == text, (streamed, text)
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
of_vllm = of | {"model": "hosted_vllm/tiny"}
again = litellm.completion(**of_vllm, messages=messages, max_tokens=8, temperature=0, top_k=5)
assert again.choices[0].message.content == text
plain = litellm.text_completion(
    **of | {"model": "text-completion-openai/tiny"}, prompt="Once", max_tokens=4, echo=True
)
assert plain.choices[0].text.startswith("Once"), plain


async def main() -> None:
    several = [
        litellm.acompletion(**of, messages=messages, max_tokens=8, temperature=0) for _ in range(4)
    ]
    assert {one.choices[0].message.content for one in await asyncio.gather(*several)} == {text}


asyncio.run(main())
refused = ""
try:
    litellm.completion(**of, messages=messages, max_tokens=10**9)
except litellm.BadRequestError as error:
    refused = str(error)
assert "max_tokens" in refused, refused
