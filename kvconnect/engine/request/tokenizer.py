"""The model's tokenizer, and text that grows token by token."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvconnect.errors import ConfigurationError
from kvconnect.tokens import TokenArray, as_token_array

_UNFINISHED = "\ufffd"
_CHARACTERS_OF_TOKEN = 8
"""The assumed characters of a token, above the average."""
_FURTHER = 8
_CUT_TOKENS = 64
"""The number of last tokens of a cut text that may differ from those of the whole text."""
_MOST_PENDING = 8
"""More tokens than the bytes of a character, so that the first is no part of an unfinished one."""
_LONGEST_PART = 4
"""The most tokens of an unfinished character, plus one."""


class Tokenizer:
    """The tokenizer of a model directory. May be used from several threads.

    Encoding changes settings inside the library's tokenizer, which must not happen while another
    thread uses it. So there are two tokenizers: one encodes, for one thread at a time, the other
    decodes.

    Raises:
        ConfigurationError: the directory holds no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._encoder: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"model: '{directory}' has no tokenizer: {error}") from error
        self._encoding = threading.Lock()
        self._decoder: Any = copy.deepcopy(self._encoder)
        self._texts: dict[int, str] = {}  # by token; no more than the vocabulary has

    @staticmethod
    def of(directory: Path) -> Tokenizer | None:
        """Returns the tokenizer of `directory`, or ``None``: token ids need none."""
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
        return Tokenizer(directory) if any((directory / name).exists() for name in names) else None

    def encode(
        self, text: str, *, most: int | None = None, special_tokens: bool = True
    ) -> TokenArray:
        """Returns the token ids of `text`.

        Args:
            text: without lone surrogates.
            most: the most tokens allowed. A text whose beginning has more is not encoded to its
                end, which could take seconds. A text with slightly more is encoded, and the engine
                refuses it with a better message.
            special_tokens: true to add the special tokens that the model expects.

        Raises:
            ConfigurationError: the beginning of `text` has more than `most` tokens.
        """
        with self._encoding:
            if most is not None:
                self._check_beginnings(text, most)
            return as_token_array(self._ids(text, special_tokens=special_tokens))

    def _check_beginnings(self, text: str, most: int) -> None:
        end = _CHARACTERS_OF_TOKEN * (most + _CUT_TOKENS)
        while end < len(text):
            found = len(self._ids(text[:end], special_tokens=False))
            if found > most + _CUT_TOKENS:
                raise ConfigurationError(
                    f"prompt: the first {end} of its {len(text)} characters are {found} tokens, "
                    f"and there is room for {most} in all; shorten it"
                )
            end *= _FURTHER

    def _ids(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoder.encode(
            text, add_special_tokens=special_tokens, verbose=False
        )
        return ids

    def use_chat_template(self, template: str) -> None:
        """Makes the Jinja `template` replace the model's own."""
        self._encoder.chat_template = template

    def info(self) -> dict[str, str | None]:
        """Returns its class, special tokens and chat template, named as in its configuration."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        template = self._encoder.chat_template
        return {
            "tokenizer_class": type(self._encoder).__name__,
            **{name: getattr(self._encoder, name, None) for name in names},
            "chat_template": template if isinstance(template, str) else None,
        }

    @property
    def has_chat_template(self) -> bool:
        """Returns whether the model has a chat template."""
        return bool(self._encoder.chat_template)

    def render_chat(self, messages: Sequence[Mapping[str, object]], **how: Any) -> str:
        """Returns the text of a conversation; `how` as in ``apply_chat_template`` of transformers.

        Special tokens are those of the template; none are to be added.
        """
        with self._encoding:
            text: str = self._encoder.apply_chat_template(list(messages), tokenize=False, **how)
        return text

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of `tokens`, without special tokens."""
        text: str = self._decoder.decode(tokens, skip_special_tokens=True)
        return text

    def whole_text(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`, with special tokens."""
        text: str = self._decoder.decode(list(tokens), skip_special_tokens=False)
        return text

    def text_of(self, token: int) -> str:
        """Returns the text of one token alone, also of a special one."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decoder.decode([token])
        return text


class Detokenizer:
    """The text of tokens that come one at a time.

    Characters whose bytes are spread over tokens appear once they are whole; invalid bytes appear
    soon after. The cost of one more token does not depend on the text before it.
    """

    __slots__ = ("_pending_from", "_prefix_from", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._prefix_from = 0  # tokens from here on are decoded again, for what precedes a word
        self._pending_from = 0  # tokens from here on have not become text yet

    def add(self, token: int) -> str:
        """Returns the text that `token` completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._new_text()
        if text and not text.endswith(_UNFINISHED):
            self._take(len(self._tokens))
            return text
        if len(self._tokens) - self._pending_from <= _MOST_PENDING:
            return ""
        return self._give_up(text)

    def finish(self) -> str:
        """Returns the rest of the text, unfinished characters replaced."""
        text = self._new_text()
        self._prefix_from = self._pending_from = len(self._tokens)
        return text

    def _give_up(self, text: str) -> str:
        """Returns the part of `text`, made of too many tokens, that no later token can change."""
        if not text:  # special tokens: they are no text of anything that follows, either
            del self._tokens[self._pending_from :]
            return ""
        end = len(self._tokens)
        for cut in range(end - 1, end - _LONGEST_PART, -1):
            rest = self._tokenizer.decode(self._tokens[cut:])
            done = self._new_text(cut)
            if done + rest == text:  # else it is within the bytes that one replacement stands for
                self._take(cut)
                return done
        self._take(end)
        return text

    def _take(self, until: int) -> None:
        """Notes that the tokens before `until` have become text."""
        self._prefix_from, self._pending_from = self._pending_from, until

    def _new_text(self, until: int | None = None) -> str:
        known = self._tokenizer.decode(self._tokens[self._prefix_from : self._pending_from])
        return self._tokenizer.decode(self._tokens[self._prefix_from : until])[len(known) :]
