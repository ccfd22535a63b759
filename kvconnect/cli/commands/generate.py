"""``kvconnect generate``: answer prompts, with or without a store."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.backends.url import parse_size
from kvconnect.cli.command import Subparsers
from kvconnect.cli.retention import parse_retention
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError
from kvconnect.request import SamplingParams

if TYPE_CHECKING:
    from kvconnect.engine.drafts import NgramSpeculation
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.request.output import RequestOutput

__all__ = ["add_parser", "run"]

logger = logging.getLogger("kvconnect")

_JSON_FIELDS = (
    "request_id",
    "prompt_tokens",
    "computed_tokens",
    "reused_device_tokens",
    "reused_host_tokens",
    "reused_store_tokens",
    "ttft_ms",
    "output_token_ids",
    "output_text",
    "finish_reason",
    "preemptions",
    "drafted_tokens",
    "accepted_tokens",
)


def add_parser(subparsers: Subparsers) -> None:
    """Add ``generate``."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts with a model, keeping its KV cache in a store",
        description="Answer prompts with a Hugging Face causal language model. With --store, the "
        "KV cache of prompts and answers is kept there, and prompts that share a beginning with an "
        "earlier one are loaded as far as that goes.",
    )
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="model directory")
    _add_input(parser)
    _add_cache(parser)
    _add_sampling(parser)
    _add_engine(parser)
    parser.set_defaults(run=run)


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and output")
    prompts = group.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", nargs="+", action="extend", metavar="TEXT", help="one prompt or several"
    )
    prompts.add_argument(
        "--prompt-file",
        nargs="+",
        action="extend",
        metavar="F",
        help="UTF-8 files, each one prompt; - is standard input",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument("--store", metavar="URL", help="for example disk:///var/cache/kv")
    group.add_argument(
        "--lookup-timeout-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="what the store may delay a step by; later answers are misses (default: 1000)",
    )
    group.add_argument("--dtype", default="auto", metavar="D", help="of model and cache")
    group.add_argument(
        "--tokens-per-block", type=int, default=32, metavar="T", help="a power of two (default: 32)"
    )
    group.add_argument(
        "--kv-cache-tokens", type=int, metavar="N", help="at most so many tokens fit the cache"
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the cache: the model's (default), or fp8: one byte each, rounded",
    )
    group.add_argument(
        "--host-cache",
        metavar="SIZE",
        help="host memory for blocks that leave the device, for example 2GiB (default: none)",
    )
    group.add_argument(
        "--max-attention-window",
        nargs="+",
        type=int,
        metavar="W",
        help="tokens that each layer looks back at most, repeated over the layers",
    )
    group.add_argument("--cache-salt", metavar="S", help="share cached blocks only under one salt")
    group.add_argument(
        "--retention",
        nargs="+",
        action="extend",
        default=[],
        metavar="R",
        help="how long blocks are worth keeping: START:END=PRIORITY[:DURATION] for prompt tokens, "
        "decode=PRIORITY[:DURATION] for the answer; priorities 0 to 100, 35 by default; for "
        "example 0:1024=90:30s",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: 1)")
    group.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal samples")
    group.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="TEXT", help="ends the answer"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end-of-sequence token"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-num-tokens", type=int, default=2048, metavar="N", help="tokens of a step"
    )
    group.add_argument(
        "--max-batch-size", type=int, default=64, metavar="N", help="requests of a step"
    )
    group.add_argument(
        "--scheduling",
        choices=("guaranteed_no_evict", "max_utilization"),
        default="guaranteed_no_evict",
        help="start a request only if all that run can get to their end (default), or as soon as "
        "its prompt fits: blocks that run out are taken from the last one started, which goes on "
        "later",
    )
    group.add_argument(
        "--speculative",
        choices=("ngram",),
        help="verify several tokens per step that followed the same words before (greedy only; "
        "the answer stays the same)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="so many at most; with --speculative (default: 5)",
    )
    group.add_argument("--device", default="auto", metavar="D", help="cpu, cuda or auto")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="answer Prometheus there meanwhile (0: any free port; -v says which)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer the prompts, in order, each printed when it is finished.

    Raises:
        ConfigurationError: a bad option, an unreadable prompt file, an unusable model or store.
    """
    prompts = list(_read_prompts(arguments))
    sampling = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    retention = parse_retention(arguments.retention)
    with _metrics(arguments.metrics_port), _open_llm(arguments) as llm:
        for output in _answers(llm, prompts, sampling, arguments.cache_salt, retention):
            if arguments.json:
                fields = {name: getattr(output, name) for name in _JSON_FIELDS}
                print(json.dumps(fields), flush=True)
            else:
                _print(output)


def _metrics(port: int | None) -> AbstractContextManager[object]:
    if port is None:
        return nullcontext()
    from kvconnect.prometheus import serve

    server = serve(port)
    logger.info("metrics on port %d", server.port)
    return server


def _read_prompts(arguments: argparse.Namespace) -> Iterator[str]:
    yield from arguments.prompt or ()
    for name in arguments.prompt_file or ():
        try:
            yield sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--prompt-file {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"--prompt-file {name}: is not UTF-8 ({error})") from error


def _open_llm(arguments: argparse.Namespace) -> LLM:
    from kvconnect.engine.llm import LLM

    connector = None
    if arguments.store is not None:
        connector = KvCacheConnectorConfig(
            url=arguments.store, lookup_timeout_ms=arguments.lookup_timeout_ms
        )
    return LLM(
        arguments.model,
        kv_cache=_cache_config(arguments),
        connector=connector,
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_tokens=arguments.max_num_tokens,
        max_batch_size=arguments.max_batch_size,
        scheduling=arguments.scheduling,
        speculative=_speculation(arguments),
    )


def _cache_config(arguments: argparse.Namespace) -> KvCacheConfig:
    host = arguments.host_cache
    windows = arguments.max_attention_window
    return KvCacheConfig(
        tokens_per_block=arguments.tokens_per_block,
        max_tokens=arguments.kv_cache_tokens,
        dtype=arguments.kv_cache_dtype,
        host_cache_size=0 if host is None else parse_size(host, field="--host-cache"),
        max_attention_window=None if windows is None else tuple(windows),
    )


def _speculation(arguments: argparse.Namespace) -> NgramSpeculation | None:
    from kvconnect.engine.drafts import NgramSpeculation

    count = arguments.num_draft_tokens
    if arguments.speculative is None:
        if count is not None:
            raise ConfigurationError(f"--num-draft-tokens {count}: needs --speculative ngram")
        return None
    return NgramSpeculation() if count is None else NgramSpeculation(num_draft_tokens=count)


def _answers(
    llm: LLM,
    prompts: list[str],
    sampling: SamplingParams,
    cache_salt: str | None,
    retention: KvCacheRetentionConfig | None,
) -> Iterator[RequestOutput]:
    from kvconnect.cli.progress import Progress

    handles = [
        llm.submit(prompt, sampling, cache_salt=cache_salt, retention=retention)
        for prompt in prompts
    ]
    with Progress("generate", len(prompts) * sampling.max_tokens, "tokens") as progress:
        for handle in handles:
            remaining = sampling.max_tokens
            for chunk in handle.stream():
                progress.advance(len(chunk.token_ids))
                remaining -= len(chunk.token_ids)
            progress.advance(remaining)  # an answer that stopped early is done all the same
            yield handle.result()


def _print(output: RequestOutput) -> None:
    print(output.output_text, flush=True)
    first = "" if output.ttft_ms is None else f"first token after {output.ttft_ms:.0f} ms; "
    print(
        f"[{output.prompt_tokens} prompt tokens: {output.reused_device_tokens} reused from the "
        f"device, {output.reused_store_tokens} from the store, {output.computed_tokens} computed; "
        f"{first}{len(output.output_token_ids)} tokens, {output.finish_reason}]",
        file=sys.stderr,
    )
