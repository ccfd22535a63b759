"""The rows of the table of planted identities.

A row is a way in which what computes, or what it is given, differs while its names stay. The
columns are those who name what they computed. A cell is a test that plants the row in a column; it
carries the marker ``planted(*rows, column, outcome)``, wherever it stands under ``tests/``, or is a
case of `cells`. One string may name several rows. What cannot happen in a column stands in
``absent/<column>.toml``, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

COLUMNS = ("engine", "prompt_cache", "vllm", "sglang", "trtllm", "transfer")
"""Our engine, `PromptCache`, vLLM (connector and tier), SGLang, TensorRT-LLM, P to D."""

OUTCOMES = ("key", "refused", "equal", "hit")
"""Another key; not cached, by a reason that is counted; equal logits or tokens; or, of what changed
nothing that computes, a hit as before."""


class Row(NamedTuple):
    """One planted identity; `name` is what cells call it by."""

    name: str
    what: str


ROWS = (
    # The files of a model's directory.
    Row("other-model", "another model under the same directory name"),
    Row("weight-byte", "one byte of a weight file differs; size and mtime stay"),
    Row("file-beside-index", "model.safetensors beside an index with shards; the shards differ"),
    Row("consolidated-beside-hf", "consolidated*.safetensors beside HF files differ"),
    Row("transformers-weights", "config.json names its weights by transformers_weights"),
    Row("variant", "files of a variant beside the usual ones"),
    Row("subfolder", "weights in a folder of the directory"),
    Row("bin-beside-safetensors", "pytorch_model.bin beside model.safetensors differs"),
    Row("pt-beside", "*.pt or *.pth beside the usual files differ"),
    Row("gguf-beside", "*.gguf beside the usual files differs"),
    Row("npz-beside", "*.npz beside the usual files differs"),
    Row("params-json", "params.json, the configuration of Mistral's format, differs"),
    Row("quantize-config", "quantize_config.json beside the weights differs"),
    Row("adapter-in-directory", "an adapter's file in the model's directory differs"),
    Row("index-changed", "the index names other shards of the same directory"),
    Row("config-changed", "config.json has another setting that shapes KV"),
    Row("files-alone", "one loader's files alone: the digest is that of earlier releases"),
    Row("switched-while-loading", "the directory, or a link to it, is switched while it is loaded"),
    Row("replaced-after-loading", "the directory is replaced after the model was loaded"),
    # What an engine makes of them.
    Row("overridden-configuration", "settings given to the engine override the directory's"),
    Row("computes-in-other-dtype", "the model computes in another dtype than it is stored in"),
    Row("cache-dtype", "the cache keeps another dtype than the model computes in"),
    Row("quantization", "weights are quantised while they are loaded"),
    Row("long-factors", "longrope's factors are chosen by a length that is not in config.json"),
    Row("weights-from-elsewhere", "weights that are not the directory's: dummy, a plug-in's"),
    Row("other-block-size", "another tokens_per_block"),
    Row("other-window", "another attention window"),
    # Weights that are replaced in a running engine.
    Row("weights-reloaded", "weights are read anew from a changed directory"),
    Row("weights-updated", "weights are written into the model by a transfer or load_state_dict"),
    Row("storage-replaced", "a parameter gets other memory"),
    Row("uncounted-write", "weights are written past torch's version counter"),
    Row("paused", "pause, sleep and reset without new weights"),
    # A model in the caller's hands.
    Row("fused-optimizer", "a step of a fused optimizer"),
    Row("training-mode", "dropout, with the model in training mode"),
    Row("changed-before-generate", "weights change between prefill and generate"),
    Row("changed-between-generates", "weights change between two generates"),
    Row("cast-to-and-fro", "weights are cast to another dtype and back"),
    Row("merged-adapter", "an adapter is merged into the weights"),
    Row("adapter-switched", "an adapter is attached, switched on or off"),
    Row("adapter-weights-changed", "weights of an attached adapter change"),
    Row("quantised-in-memory", "weights are quantised in memory"),
    Row("buffer-changed", "a buffer changes, non-persistent ones such as inv_freq too"),
    Row("setting-changed", "a setting of the loaded model's configuration changes"),
    Row("hook-added", "a hook changes what a module returns"),
    Row("forward-patched", "a module's class or forward is replaced"),
    Row("embeddings-resized", "the embeddings are resized"),
    Row("weights-not-stored", "layers that the files have no weights for, initialised at random"),
    Row("same-revision", "model_revision promises weights; settings differ"),
    # What a pass computes.
    Row("inner-model-called", "the inner model is called with the cache"),
    Row("mask-4d", "a 4-D mask"),
    Row("mask-of-later-pass", "a later pass masks tokens of an earlier one"),
    Row("positions-of-later-pass", "a later pass has positions of its own"),
    Row("embeddings-given", "embeddings instead of ids"),
    Row("cropped", "the cache is cropped and goes on with other tokens"),
    Row("foreign-pass", "another model's pass writes into the cache"),
    # Models that a cache changes.
    Row("bidirectional", "attention that also looks ahead"),
    Row("encoder-as-decoder", "an encoder's family as a decoder, BERT's"),
    Row("window-not-passed", "a window that attention is never told of: Moshi"),
    Row("alibi-by-length", "positions that depend on the length of the cache: MPT"),
    Row("dynamic-rope", "dynamic RoPE at and beyond the original length"),
    # What comes with a request.
    Row("other-picture", "another picture behind the same placeholder tokens"),
    Row("picture-settings", "pictures with other settings of their processor"),
    Row("picture-uuid", "an identifier of the client's for another picture"),
    Row("picture-uuid-like-hash", "an identifier of the client's that looks like a hash"),
    Row("sound-or-video", "another sound or video behind the same tokens"),
    Row("prompt-embeddings", "embeddings in a prompt instead of tokens"),
    Row("other-salt", "the same prompt under another salt"),
    Row("long-salt", "salts that are long, empty, or alike in their beginnings"),
    Row("other-adapter", "another adapter under the same name or number"),
    Row("no-adapter", "no adapter, where other requests have one"),
    # Ranks.
    Row("rank-share", "two ranks hold different heads under one block key"),
    Row("other-rank-count", "a store written by another number of ranks"),
    # On the wire.
    Row("bit-in-data", "a flipped bit in a block on its way"),
    Row("bit-in-block-id", "a flipped bit in a block's id of a grant"),
    Row("bit-in-control", "a flipped bit elsewhere in a control message"),
    Row("replayed-control", "a control message is repeated, left out, or of another connection"),
    Row("other-model-at-peer", "the peer has another model, or another geometry"),
    Row("stale-lease", "a read under a lease that has ended"),
    # Runtimes that tell of a request twice, or of blocks that are gone.
    Row("request-reset", "a request that was reset goes on with other pages"),
    Row("request-new-again", "a request is reported as new again"),
    Row("blocks-passed-by-window", "ids of -1, blocks that a window has passed"),
    Row("other-interface", "the runtime's interface has another form"),
)


def cells(column: str, outcome: str, table: Mapping[str, Any]) -> list[Any]:
    """Returns `table` as cases of a test: each plants the row that its name begins with.

    Args:
        column: of the table.
        outcome: of all cases.
        table: the test's arguments, by the row's name, or by ``row: what`` where a row has several.
    """
    return [
        pytest.param(
            *(values if isinstance(values, tuple) else (values,)),
            id=name,
            marks=pytest.mark.planted(name.partition(":")[0], column, outcome),
        )
        for name, values in table.items()
    ]
