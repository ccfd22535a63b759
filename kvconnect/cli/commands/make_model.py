"""The command ``kvconnect make-model``: writes a small random model for tests."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvconnect.cli.command import add_number
from kvconnect.errors import ConfigurationError

_SIZES = {
    "hidden_size": "width of the model",
    "num_layers": "number of layers",
    "num_heads": "attention heads of each layer",
    "num_kv_heads": "key and value heads of each layer",
    "intermediate_size": "width of the feed-forward layers",
    "max_position_embeddings": "longest sequence",
    "sliding_window": "window of architectures that have one",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``make-model``."""
    parser.description = (
        "Write a random model with a byte-level tokenizer (one token per byte) to DIR, "
        "as a Hugging Face model directory. Nothing is downloaded. Equal arguments write equal "
        "weights."
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="made if it does not exist")
    parser.add_argument("--arch", default="llama", help="architecture (default: llama)")
    parser.add_argument("--list-archs", action=_ListArchitectures, help="list them, and exit")
    parser.add_argument(
        "--preset", default="tiny", help="size to start from: tiny or demo (default: tiny)"
    )
    add_number(parser, "--seed", "of the weights", default=0)
    parser.add_argument(
        "--dtype", default="float32", metavar="D", help="of the weights (default: float32)"
    )
    parser.add_argument("--force", action="store_true", help="write into a directory with a model")
    sizes = parser.add_argument_group("size", "Each replaces a number of the preset.")
    for name, meaning in _SIZES.items():
        flags = [f"--{name.replace('_', '-')}"] + (["--layers"] if name == "num_layers" else [])
        sizes.add_argument(*flags, dest=name, type=int, metavar="N", help=meaning)


def run(arguments: argparse.Namespace) -> None:
    """Writes the model and prints a line about it.

    Raises:
        ConfigurationError: an unknown architecture or a bad size, or the directory holds a model.
    """
    from kvconnect.engine.checkpoint.random_model import make_model

    directory: Path = arguments.directory
    if not arguments.force and (directory / "config.json").exists():
        raise ConfigurationError(f"DIR: '{directory}' holds a model already; --force overwrites it")
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    make_model(
        directory,
        arguments.arch,
        seed=arguments.seed,
        preset=arguments.preset,
        dtype=arguments.dtype,
        **{name: size for name, size in sizes.items() if size is not None},
    )
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    print(f"{directory}: {arguments.arch}, {nbytes / 1e6:.1f} MB of {arguments.dtype} weights")


class _ListArchitectures(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvconnect.engine.checkpoint.random_model import ARCHITECTURES

        print("\n".join(ARCHITECTURES))
        parser.exit()
