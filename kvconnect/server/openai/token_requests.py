"""The requests of ``POST /tokenize`` and ``/detokenize``, as in vLLM: text to ids and back."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, StrictBool, model_validator

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError
from kvconnect.server.openai.chat_request import TemplateRequest
from kvconnect.server.openai.model_request import ModelRequest, kinds_in
from kvconnect.text import check_text

__all__ = ["DetokenizeRequest", "TokenRequest", "TokenizeRequest", "tokenizer_of"]


class TokenRequest(ModelRequest):
    """A request that the tokenizer alone answers."""

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Returns the JSON object that answers it; blocks as long as the tokenizer does.

        Raises:
            ConfigurationError: the model has no tokenizer, or the text or the tokens are wrong.
        """
        raise NotImplementedError


class TokenizeRequest(TemplateRequest, TokenRequest):
    """A request for the tokens of a text or a conversation.

    Attributes:
        prompt: a text.
        messages: a conversation instead, which the model's chat template formats.
        add_special_tokens: true to add the special tokens that the model expects; by default for
            text only.
        return_token_strs: true to include the text of each token.
    """

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt, messages: give one of them")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the chat template writes them; leave it out")
        return self

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Implements `TokenRequest.answer`."""
        tokenizer = tokenizer_of(llm)
        if self.messages is not None:
            tokens = self.formatted(llm, self.messages)["prompt_token_ids"].tolist()
        else:
            text = self.prompt or ""
            check_text("prompt", text)
            special = self.add_special_tokens is not False
            tokens = tokenizer.encode(text, special_tokens=special).tolist()
        told = {"count": len(tokens), "max_model_len": llm.max_seq_len, "tokens": tokens}
        strings = [tokenizer.text_of(one) for one in tokens] if self.return_token_strs else None
        return told | {"token_strs": strings}


def _token_ids(given: object) -> object:
    # Pydantic would report an error for each entry of a long list.
    if isinstance(given, list) and kinds_in(given) <= {int}:
        return given
    raise ValueError("must be a list of token ids")


class DetokenizeRequest(TokenRequest):
    """A request for the text of tokens.

    Attributes:
        tokens: the token ids.
    """

    tokens: Annotated[list[int], PlainValidator(_token_ids)]

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Implements `TokenRequest.answer`."""
        tokenizer = tokenizer_of(llm)
        most = llm.vocab_size
        for token in self.tokens:
            if not 0 <= token < most:
                raise ConfigurationError(
                    f"tokens: {token} is outside the model's vocabulary of {most}"
                )
        return {"prompt": tokenizer.whole_text(self.tokens)}


def tokenizer_of(llm: LLM) -> Tokenizer:
    """Returns the tokenizer of `llm`.

    Raises:
        ConfigurationError: `llm` has none.
    """
    if llm.tokenizer is None:
        raise ConfigurationError("model: its directory has no tokenizer")
    return llm.tokenizer
