"""The options that name the prompts of a verb: text, chats, token ids, keys, a tenant, or all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvconnect.backends.url import format_size
from kvconnect.cli.command import add_url
from kvconnect.cli.prompts import GivenPrompt, add_prompt_options, read_prompts
from kvconnect.errors import ConfigurationError
from kvconnect.keys import check_salt
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Result
from kvconnect.operations.which import Which
from kvconnect.tokens import TokenArray

R = TypeVar("R", bound=Result)


def add_wanted(parser: argparse.ArgumentParser) -> None:
    """Adds the store, the model, and the options that `store_and_wanted` reads."""
    add_url(parser)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="only blocks of this model: its directory, its name in the Hugging Face cache, or the "
        "first digits of its digest; text and chats need the directory or the name",
    )
    add_model_revision(parser)
    group = parser.add_argument_group("which blocks")
    add_prompt_options(group, required=False)
    group.add_argument(
        "--key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="of a block, or its first digits, as 'kvconnect ls' shows them",
    )
    group.add_argument(
        "--salt",
        metavar="TEXT",
        help="of requests with this cache_salt; without a prompt all of them, under any model, "
        "adapter and engine; of TensorRT-LLM, where it tells the number of a salt alone, id:NUMBER",
    )
    group.add_argument("--lora", metavar="ID", help="of requests with this adapter")
    group.add_argument("--all", action="store_true", help="all blocks, of MODEL if it is given")


def add_model_revision(parser: argparse.ArgumentParser) -> None:
    """Adds the option of the name that engines give the weights of the argument MODEL."""
    parser.add_argument(
        "--model-revision",
        metavar="NAME",
        help="what engines name the weights of MODEL, if they do (model_revision)",
    )


def store_and_wanted(arguments: argparse.Namespace) -> tuple[PromptStore, Which]:
    """Returns the store, and the blocks that `arguments` name.

    Raises:
        ConfigurationError: an option is wrong, or a prompt cannot be read.
    """
    check_salt(arguments.salt, "--salt")
    store = PromptStore(arguments.url, arguments.model, model_revision=arguments.model_revision)
    which = given_prompts(arguments, store)
    which["everything"] = arguments.all
    prompts = "prompts" in which
    if not prompts:
        which["salt"] = arguments.salt
    if arguments.key:
        which["keys"] = arguments.key
    if not (prompts or arguments.key or arguments.salt or arguments.lora or arguments.all):
        raise ConfigurationError(
            "nothing says which blocks; give --prompt, --prompt-file, --jsonl, --key, --salt, "
            "--lora or --all"
        )
    return store, which


def wanted_of_server(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the body of a request to a server about the blocks that `arguments` name.

    Raises:
        ConfigurationError: a prompt cannot be read.
    """
    # Conversations stand behind the others, as the server's answer counts them.
    given = sorted(read_prompts(arguments, {}), key=lambda one: one.form == "messages")
    chats = [one.content for one in given if one.form == "messages"]
    others = [one.content for one in given if one.form != "messages"]
    body: dict[str, object] = {
        "prompts": others or None,
        "messages": chats or None,
        "salt": [one.cache_salt for one in given] if given else arguments.salt,
        "lora": arguments.lora,
    }
    return {name: value for name, value in body.items() if value is not None}


def given_prompts(arguments: argparse.Namespace, store: PromptStore) -> Which:
    """Returns the prompts that `arguments` give, if any, with their salts and the adapter.

    Raises:
        ConfigurationError: a prompt cannot be read.
    """
    which: Which = {"lora": arguments.lora}
    # Sampling parameters in a line of a file are ignored.
    prompts = list(read_prompts(arguments, {}))
    if prompts or arguments.jsonl:  # an empty file chooses no block
        which["prompts"] = [tokens_of(store, one) for one in prompts]
        which["salt"] = [one.cache_salt for one in prompts]
    return which


@contextmanager
def reported(arguments: argparse.Namespace, done: R, what: str, **more: object) -> Iterator[R]:
    """Prints `what`, the counts of `done` and its notes at the end of the context.

    That is also so after Ctrl-C. With ``--json`` it prints the counts and `more` as an object. If
    the store was not opened, it prints no line.
    """
    try:
        yield done
    finally:
        if done.opened:
            _report(arguments, done, what, more)


def _report(
    arguments: argparse.Namespace, done: Result, what: str, more: dict[str, object]
) -> None:
    if arguments.json:
        print(json.dumps(done.numbers() | more), flush=True)
        return
    parts = [f"{what} {done.blocks} blocks, {format_size(done.bytes)}, {done.tokens} tokens"]
    if done.missing:
        parts.append(f"{done.missing} tokens of the prompts are not stored")
    if done.missing_keys:
        parts.append(f"no block has {done.missing_keys} of the keys")
    if not done.complete:
        parts.append("not complete: the same command goes on")
    print("; ".join([*parts, *done.notes()]), flush=True)


def tokens_of(store: PromptStore, prompt: GivenPrompt) -> TokenArray:
    """Returns the token ids of `prompt`, by the tokenizer of the store's model."""
    if prompt.form == "messages":
        return store.chat_tokens(prompt.content)
    return store.tokens(prompt.content)
