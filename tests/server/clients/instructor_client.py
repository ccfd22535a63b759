"""instructor's JSON mode: answers that are objects of a class."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

url = sys.argv[1]


class Answer(BaseModel):
    """Whatever the model says."""

    value: int


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON
)
answer = client.chat.completions.create(
    model="tiny",
    messages=[{"role": "user", "content": "A number, please."}],
    response_model=Answer,
    max_tokens=40,
    max_retries=1,
)
assert isinstance(answer.value, int)
