"""The command ``kvconnect generate``: answers prompts, with or without a store."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TextIO

from kvconnect.cli.command import Options, add_json, add_number, add_old_name, picked
from kvconnect.cli.options.engine_options import (
    add_cache_options,
    add_engine_options,
    add_model,
    open_llm,
)
from kvconnect.cli.prompts import GivenPrompt, add_prompt_options, read_prompts
from kvconnect.config import KvCacheRetentionConfig
from kvconnect.operations.progress import Progress
from kvconnect.sampling_params import SamplingParams
from kvconnect.simulate.retention_policy import RetentionPolicy

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.request.output import CompletionOutput, RequestOutput

logger = logging.getLogger("kvconnect")

_JSON_FIELDS = (
    "request_id",
    "prompt_tokens",
    "computed_tokens",
    "reused_device_tokens",
    "reused_host_tokens",
    "reused_store_tokens",
    "lookup_late",
    "ttft_ms",
    "output_token_ids",
    "output_text",
    "finish_reason",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
)
# All of C0 and C1 except tabs and line ends. A lone carriage return would overwrite its line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``generate``."""
    parser.description = (
        "Answer prompts with a Hugging Face causal language model. With --store, the "
        "KV cache of prompts and answers is kept there, and prompts that share a beginning with an "
        "earlier one are loaded as far as that goes."
    )
    add_model(parser)
    _add_input(parser)
    _add_sharing(add_cache_options(parser))
    _add_sampling(parser)
    _add_metrics(add_engine_options(parser))


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and output")
    add_prompt_options(group)
    add_json(group, "prompt")


def _add_sharing(group: Options) -> None:
    group.add_argument("--salt", metavar="TEXT", help="share cached blocks only under one salt")
    add_old_name(group, "--cache-salt", "--salt")
    group.add_argument(
        "--retention",
        nargs="+",
        action="extend",
        default=[],
        metavar="PART=PRIORITY[:DURATION]",
        help="how long blocks are worth keeping; PART is prompt tokens, as in 0:1024=90:30s, or "
        "decode, the answer; priorities are 0 to 100, 35 without (default: none)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    add_number(group, "--max-tokens", "of an answer", default=16)
    add_number(group, "--min-tokens", "no end before so many", default=0)
    add_number(group, "--n", "answers to each prompt; needs a temperature", default=1)
    add_number(group, "--temperature", "0 is greedy", default=0.0, metavar="X")
    add_number(group, "--top-k", "0: all", default=0, metavar="K")
    add_number(group, "--top-p", default=1.0, metavar="P")
    add_number(group, "--seed", "equal seeds give equal samples")
    for name, about, default in (
        ("presence", "against tokens that were generated, -2 to 2", 0.0),
        ("frequency", "the same for each time, -2 to 2", 0.0),
        ("repetition", "also against those of the prompt, above 0; 1 is none", 1.0),
    ):
        add_number(group, f"--{name}-penalty", about, default=default, metavar="P")
    add_number(
        group,
        "--logprobs",
        "log probabilities of so many likeliest tokens; with --json",
        metavar="K",
    )
    group.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="ends the answer"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end-of-sequence token"
    )


def _add_metrics(group: Options) -> None:
    add_number(
        group,
        "--metrics-port",
        "answer Prometheus there meanwhile (0: any free port; -v says which)",
        metavar="PORT",
    )
    group.add_argument(
        "--metrics-address",
        default="127.0.0.1",
        metavar="IP",
        help="where to listen for it (default: 127.0.0.1, this machine only; 0.0.0.0: everywhere)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Answers the prompts, in order, each printed when it is finished.

    Raises:
        ConfigurationError: a bad option, an unreadable prompt file, an unusable model or store.
    """
    prompts = list(
        read_prompts(
            arguments,
            picked(arguments, *(SamplingParams.model_fields.keys() & vars(arguments).keys())),
        )
    )
    retention = RetentionPolicy(arguments.retention, ("decode",)).config(None, line=0)
    with _metrics(arguments), open_llm(arguments) as llm:
        for prompt, output in _answers(llm, prompts, retention):
            if arguments.json:
                print(json.dumps(_fields(prompt, output)), flush=True)
            else:
                _print(output)


def _fields(prompt: GivenPrompt, output: RequestOutput) -> dict[str, object]:
    """Returns the fields of ``--json``; lists completions only if there are several."""
    fields = {name: getattr(output, name) for name in _JSON_FIELDS}
    if prompt.sampling.n > 1 or prompt.sampling.logprobs is not None:
        fields["outputs"] = [
            _as_fields(one) | {"cumulative_logprob": one.cumulative_logprob}
            for one in output.outputs
        ]
    return fields


def _as_fields(completion: CompletionOutput) -> dict[str, object]:
    found = completion.logprobs
    logprobs = (
        None
        if found is None
        else [{token: asdict(each) for token, each in one.items()} for one in found]
    )
    return asdict(replace(completion, logprobs=None)) | {"logprobs": logprobs}


def _metrics(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    if arguments.metrics_port is None:
        return nullcontext()
    from kvconnect.prometheus import serve

    server = serve(arguments.metrics_port, arguments.metrics_address)
    logger.info("metrics on %s port %d", arguments.metrics_address, server.port)
    return server


def _answers(
    llm: LLM, prompts: list[GivenPrompt], retention: KvCacheRetentionConfig | None
) -> Iterator[tuple[GivenPrompt, RequestOutput]]:
    lengths = [prompt.sampling.n * prompt.sampling.max_tokens for prompt in prompts]
    handles = [prompt.submit(llm, retention) for prompt in prompts]
    with Progress("generate", sum(lengths), "tokens") as progress:
        for prompt, handle, remaining in zip(prompts, handles, lengths, strict=True):
            left = remaining
            for chunk in handle.stream():
                progress.advance(len(chunk.token_ids))
                left -= len(chunk.token_ids)
            progress.advance(left)  # an answer that stopped early is complete
            yield prompt, handle.result()


def _print(output: RequestOutput) -> None:
    for completion in output.outputs:
        print(shown_on(sys.stdout, completion.text), flush=True)
    late = " (its lookup came too late: --lookup-timeout)" if output.lookup_late else ""
    first = "" if output.ttft_ms is None else f"first token after {output.ttft_ms:.0f} ms; "
    print(
        f"[{output.prompt_tokens} prompt tokens: {output.reused_device_tokens} reused from the "
        f"device, {output.reused_store_tokens} from the store{late}, {output.computed_tokens} "
        f"computed; "
        f"{first}{sum(len(one.token_ids) for one in output.outputs)} tokens, "
        f"{', '.join(one.finish_reason for one in output.outputs)}]",
        file=sys.stderr,
    )


def shown_on(stream: TextIO, text: str) -> str:
    r"""Returns the form of `text` to write to `stream`.

    On a terminal, control characters except tabs and line ends are escaped (``\x1b``). Files and
    pipes get `text` unchanged, since programs read them.
    """
    if not stream.isatty():
        return text
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
