"""llama-index: a completion, a chat, streams, and its client for servers like OpenAI's."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1]
of = {"api_base": f"{url}/v1", "api_key": "none", "model": "tiny", "temperature": 0.0}

for is_chat_model in (False, True):
    llm = OpenAILike(**of, is_chat_model=is_chat_model, context_window=4096, max_tokens=8)
    whole = llm.complete("Once upon a time")
    *_, last = llm.stream_complete("Once upon a time")
    assert last.text == whole.text, (last, whole)
    messages = [ChatMessage(role="user", content="What is a KV cache?")]
    answer = llm.chat(messages)
    *_, last = llm.stream_chat(messages)
    assert last.message.content == answer.message.content, (last, answer)
