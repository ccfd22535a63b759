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
# Half of the byte tokenizer's tokens end the answer: instructor does not parse one that is cut.
ENDS = list(range(0, 256, 2))


class Number(BaseModel):
    """The object that is asked for."""

    value: int


def ask(mode: instructor.Mode) -> InstructorRetryException | None:
    """What the client gave up with."""
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    try:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_model=Number,
            max_tokens=256,
            max_retries=2,
            seed=1,
            extra_body={"stop_token_ids": ENDS},
        )
    except InstructorRetryException as error:
        return error
    return None


plain = ask(instructor.Mode.MD_JSON)
assert plain is not None
assert {type(one.exception).__name__ for one in plain.failed_attempts} == {"ValidationError"}, plain
asked = [one.completion.usage.prompt_tokens for one in plain.failed_attempts]
assert len(asked) > 1, plain
assert asked == sorted(set(asked)), plain  # each time with the error of the one before
refused = ask(instructor.Mode.JSON)
assert "response_format: {'type': 'json_object'} is not served" in str(refused), refused
