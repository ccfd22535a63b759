"""The command ``kvconnect explain``: the stored tokens of a prompt, and why others are not used."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kvconnect.cli.command import NothingMatched, add_json, add_url
from kvconnect.cli.prompts import add_prompt_options, read_prompts
from kvconnect.cli.wanted import add_model_revision, tokens_of
from kvconnect.explain.outcome import Outcome
from kvconnect.keys import check_salt
from kvconnect.operations.explain import StoredPrompt
from kvconnect.operations.prompt_store import PromptStore

_EPILOG = """\
examples:
  kvconnect explain disk:///var/cache/kv MODEL --prompt-file contract.txt
  kvconnect explain redis://host MODEL --jsonl prompts.jsonl --salt tenant-7 --json

exit codes: 0 a part of each prompt is stored for it, 2 wrong usage or configuration, 3 nothing is
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``explain``."""
    parser.description = (
        "Say what a store has of prompts, and what stands in the way of the rest: where each "
        "leaves what is stored, and under which other salts, adapters, models, engines and block "
        "sizes its tokens are stored. The store is only read."
    )
    parser.epilog = _EPILOG
    add_url(parser)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the model's directory, its name in the Hugging Face cache, or the first digits of "
        "its digest; text and chats need the directory or the name",
    )
    add_model_revision(parser)
    group = parser.add_argument_group("which prompts")
    add_prompt_options(group)
    group.add_argument("--salt", metavar="TEXT", help="of requests with this cache_salt")
    group.add_argument("--lora", metavar="ID", help="of requests with this adapter")
    group.add_argument(
        "--tokens-per-block",
        type=int,
        metavar="T",
        help="of the engine that will ask (default: any)",
    )
    add_json(parser, "print one JSON object per prompt")


def run(arguments: argparse.Namespace) -> None:
    """Explains each prompt and prints the result.

    Raises:
        ConfigurationError: an option is wrong, or a prompt cannot be read.
        NothingMatched: for one of the prompts, the store has no token that such a request can use.
    """
    check_salt(arguments.salt, "--salt")
    store = PromptStore(arguments.url, arguments.model, model_revision=arguments.model_revision)
    missing = 0
    for number, prompt in enumerate(read_prompts(arguments, {}), 1):
        found = store.explain(
            tokens_of(store, prompt),
            salt=prompt.cache_salt,
            lora=arguments.lora,
            tokens_per_block=arguments.tokens_per_block,
        )
        missing += all(span.outcome is not Outcome.REUSED for span in found.spans)
        _report(number, found, as_json=arguments.json)
    if missing:
        raise NothingMatched(f"nothing of {missing} prompts is stored for such a request")


def _report(number: int, found: StoredPrompt, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"prompt": number} | asdict(found)), flush=True)
        return
    counts: dict[str, int] = {}
    for span in found.spans:
        counts[span.outcome] = counts.get(span.outcome, 0) + len(span)
    summed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"prompt {number}: {found.prompt_tokens} tokens: {summed}")
    for one in found.stored:
        why = f"; not for this request: other {', '.join(one.differs)}" if one.differs else ""
        print(
            f"  {one.tokens} tokens are stored in blocks of {one.tokens_per_block}, model "
            f"{one.model[:12]}, layout {one.layout[:12]}{why}"
        )
    if (there := found.divergence) is not None:
        print(f"  it leaves what is stored at token {there.position}")
        if there.prompt_text or there.cached_text:
            print(f"    after  {there.before!r}")
            print(f"    prompt {there.prompt_text!r}")
            print(f"    stored {there.cached_text!r}", flush=True)
