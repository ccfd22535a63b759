"""Reads the prompts of a command line: arguments, files of one prompt, JSONL files of many."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconnect.config import KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.keys import check_salt
from kvconnect.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.request.handle import RequestHandle

_FORMS = ("prompt", "prompt_token_ids", "messages")
_FORM = 'write {"prompt": "…"}, {"prompt_token_ids": […]} or {"messages": […]}'
_UTF8 = ("utf-8", "strict")


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt to answer.

    Attributes:
        content: the content of `form`: text, token ids, or the messages of a conversation.
        form: ``prompt``, ``prompt_token_ids`` or ``messages``.
        sampling: its sampling parameters.
        cache_salt: the salt of its blocks.
    """

    content: Any
    form: str
    sampling: SamplingParams
    cache_salt: str | None

    def as_chat(self) -> GivenPrompt:
        """Returns the prompt as a conversation, its text as a message of the user.

        Raises:
            ConfigurationError: the prompt consists of token ids.
        """
        if self.form == "messages":
            return self
        if self.form != "prompt":
            raise ConfigurationError("--chat: token ids are no message; give a text or messages")
        messages = [{"role": "user", "content": self.content}]
        return GivenPrompt(messages, "messages", self.sampling, self.cache_salt)

    def submit(self, llm: LLM, retention: KvCacheRetentionConfig | None) -> RequestHandle:
        """Starts the prompt's request."""
        prompt = (
            llm.chat_prompt(self.content) if self.form == "messages" else {self.form: self.content}
        )
        return llm.submit(prompt, self.sampling, cache_salt=self.cache_salt, retention=retention)


def add_prompt_options(group: argparse._ArgumentGroup, *, required: bool = True) -> None:
    """Adds the options of prompts; with `required`, one of them must be given."""
    prompts = group.add_mutually_exclusive_group(required=required)
    prompts.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="one prompt or several"
    )
    prompts.add_argument(
        "--prompt-file",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="UTF-8 files, each one prompt; - is standard input",
    )
    prompts.add_argument(
        "--jsonl",
        nargs="+",
        action="extend",
        metavar="FILE",
        help="files of one prompt a line; - is standard input. A line is a JSON string, a list of "
        "token ids, or an object with prompt, prompt_token_ids or messages, and, if wanted, "
        "cache_salt and sampling parameters of its own, named as in Python (max_tokens, …)",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is what a user says: put it into the model's chat template",
    )


def read_prompts(
    arguments: argparse.Namespace, sampling: Mapping[str, object]
) -> Iterator[GivenPrompt]:
    """Yields the prompts that `arguments` name, in order.

    Args:
        arguments: the arguments of `add_prompt_options`, and ``salt``.
        sampling: fields of `SamplingParams`, for prompts without their own.

    Raises:
        ConfigurationError: a file cannot be read, or a line of it is wrong, which it names.
    """
    check_salt(arguments.salt, "--salt")
    plain = SamplingParams.given("sampling", sampling)
    texts = list(arguments.prompt or ())
    texts += [_read("--prompt-file", name) for name in arguments.prompt_file or ()]
    given = [GivenPrompt(text, "prompt", plain, arguments.salt) for text in texts]
    for name in arguments.jsonl or ():
        # Not `splitlines`: a JSON string may hold other line ends, as U+2028.
        for number, line in enumerate(_read("--jsonl", name).split("\n"), 1):
            if not line.strip():
                continue
            try:
                given.append(_of_line(line, sampling, arguments.salt))
            except ConfigurationError as error:
                raise ConfigurationError(f"--jsonl {name} line {number}: {error}") from error
    for one in given:
        yield one.as_chat() if arguments.chat else one


def _read(option: str, name: str) -> str:
    try:
        if name != "-":
            return Path(name).read_text(encoding="utf-8")
        stdin = sys.stdin
        if isinstance(stdin, io.TextIOWrapper) and (stdin.encoding, stdin.errors) != _UTF8:
            stdin.reconfigure(encoding=_UTF8[0], errors=_UTF8[1])  # by default the locale decides
        return stdin.read()
    except OSError as error:
        raise ConfigurationError(f"{option} {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{option} {name}: is not UTF-8 ({error})") from error


def _of_line(line: str, sampling: Mapping[str, object], cache_salt: str | None) -> GivenPrompt:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"is not JSON ({error})") from error
    if isinstance(given, str):
        given = {"prompt": given}
    elif isinstance(given, list):
        given = {"prompt_token_ids": given}
    elif not isinstance(given, dict):
        raise ConfigurationError(_FORM)
    known = {*_FORMS, "cache_salt", *SamplingParams.model_fields}
    for key in given:
        if key not in known:
            raise ConfigurationError(f"unknown key '{key}'; {nearest(key, known)}")
    forms = [form for form in _FORMS if form in given]
    if len(forms) != 1:
        raise ConfigurationError(f"{len(forms)} of {', '.join(_FORMS)} are given; {_FORM}")
    (form,) = forms
    check_salt(given.get("cache_salt"))
    own = {name: given[name] for name in given.keys() & SamplingParams.model_fields.keys()}
    return GivenPrompt(
        given[form],
        form,
        SamplingParams.given("sampling", {**sampling, **own}),
        given.get("cache_salt", cache_salt),
    )
