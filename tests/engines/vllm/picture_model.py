"""A small random model with pictures: BLIP-2, which vLLM runs without torchvision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessor,
    OPTConfig,
    PreTrainedTokenizerFast,
)

_SIDE = 56  # pixels of a picture
_NUM_QUERIES = 8  # tokens that stand for it
_IMAGE = 253
_NAMES = {"<unk>": 250, "<s>": 251, "</s>": 252, "<image>": _IMAGE, "<pad>": 254}


def make_picture_model(directory: Path) -> Path:
    """Writes the model, its tokenizer and its image processor to `directory`."""
    torch.manual_seed(0)
    size = {"num_hidden_layers": 2, "num_attention_heads": 2}
    narrow = size | {"hidden_size": 64, "intermediate_size": 64}
    vision = Blip2VisionConfig(image_size=_SIDE, patch_size=14, **narrow)
    former = Blip2QFormerConfig(
        vocab_size=256, encoder_hidden_size=64, cross_attention_frequency=1, **narrow
    )
    text = OPTConfig(
        vocab_size=256,
        hidden_size=256,
        word_embed_proj_dim=256,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=2048,
        bos_token_id=251,
        eos_token_id=252,
        pad_token_id=254,
    )
    parts = {"vision_config": vision, "qformer_config": former, "text_config": text}
    config = Blip2Config(
        num_query_tokens=_NUM_QUERIES,
        image_token_index=_IMAGE,
        **{name: one.to_dict() for name, one in parts.items()},
    )
    model = Blip2ForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(directory)
    Blip2Processor(
        image_processor=BlipImageProcessor(size={"height": _SIDE, "width": _SIDE}),
        tokenizer=_tokenizer(),
        num_query_tokens=_NUM_QUERIES,
    ).save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"<{number}>": number for number in range(250)} | _NAMES
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )


def picture(seed: int) -> Image.Image:
    """A random one."""
    pixels = np.random.default_rng(seed).integers(0, 255, (_SIDE, _SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
