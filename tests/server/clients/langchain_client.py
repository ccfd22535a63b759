"""langchain-openai: a chat, a stream, a batch, and the counts of tokens."""

from __future__ import annotations

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

url = sys.argv[1]
of = {"base_url": f"{url}/v1", "api_key": "none", "model": "tiny", "temperature": 0}

chat = ChatOpenAI(**of, max_tokens=8, seed=1)
answer = chat.invoke("What is a KV cache?")
assert answer.usage_metadata["output_tokens"], answer
parts = list(chat.stream("What is a KV cache?", stream_usage=True))
assert "".join(part.content for part in parts) == answer.content
counted = sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata)
assert counted == answer.usage_metadata["output_tokens"]
template = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("human", "{question}")])
several = [{"how": "brief", "question": f"Number {number}?"} for number in range(4)]
assert len((template | chat).batch(several)) == 4
scored = chat.bind(logprobs=True, top_logprobs=2).invoke("And this?")
assert scored.response_metadata["logprobs"]["content"]
plain = OpenAI(**of, max_tokens=8)
assert isinstance(plain.invoke("Once upon a time"), str)
assert "".join(plain.stream("Once upon a time")) == plain.invoke("Once upon a time")
