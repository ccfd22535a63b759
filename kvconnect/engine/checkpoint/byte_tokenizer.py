"""A tokenizer whose token ids are the bytes of the text; written locally, never downloaded."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["BOS_ID", "EOS_ID", "PAD_ID", "VOCAB_SIZE", "write_byte_tokenizer"]

EOS_ID, BOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 260

_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_byte_tokenizer(directory: Path, *, model_max_length: int) -> None:
    """Writes ``tokenizer.json``, its configuration and a chat template to `directory`."""
    # Byte-level BPE names byte b by a printable character: bytes that are printable in latin-1
    # stand for themselves, the others are moved up behind them, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    specials = {"</s>": EOS_ID, "<s>": BOS_ID, "<pad>": PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="</s>",  # noqa: S106  no secret
        bos_token="<s>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(directory)
