"""instructor: objects out of answers, in its mode for servers without `response_format`.

A random model says no JSON, so that only the way there is tried: what the server answers reaches
the validation of the class, and is asked for again with the error. Mode JSON needs
`response_format`, which is refused by name.
"""

from __future__ import annotations

import sys

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel

url = sys.argv[1]
MESSAGES = [{"role": "user", "content": "A number, please."}]


class Number(BaseModel):
    """The object that is asked for."""

    value: int


def ask(mode: instructor.Mode) -> InstructorRetryException | None:
    """What the client gave up with."""
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    try:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_model=Number, max_tokens=8, max_retries=2
        )
    except InstructorRetryException as error:
        return error
    return None


plain = ask(instructor.Mode.MD_JSON)
assert plain is None or plain.total_usage.completion_tokens > 8, plain
assert plain is None or "Error code" not in str(plain), plain
refused = ask(instructor.Mode.JSON)
assert "response_format: {'type': 'json_object'} is not served" in str(refused), refused
