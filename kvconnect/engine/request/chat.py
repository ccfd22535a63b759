"""Turns conversations into the tokens of a prompt, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError
from kvconnect.text import check_text, shown
from kvconnect.tokens import TokenArray

Message: TypeAlias = Mapping[str, object]
"""``role`` and ``content``: a string, or a list of parts ``{"type": "text", "text": …}``."""

Conversation: TypeAlias = Sequence[Message]

_TEXT_PARTS = ("text", "input_text", "output_text")


def as_conversations(
    messages: Conversation | Sequence[Conversation],
) -> list[Conversation]:
    """Returns `messages` as a list of conversations, also if it is a single one.

    Raises:
        ConfigurationError: it is neither, or empty.
    """
    _check_list(messages)
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    return list(cast("Sequence[Conversation]", messages))


def _check_list(messages: object) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigurationError(
            "messages: a list of messages is needed, as in [{'role': 'user', 'content': '…'}]; "
            f"this is a {type(messages).__name__}"
        )


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The form in which a conversation becomes a prompt; the names are transformers'.

    Attributes:
        chat_template: a Jinja template; ``None``: the model's own.
        add_generation_prompt: end with the beginning of the model's answer.
        continue_final_message: leave the last message open, so that the answer continues it.
        tools: JSON schemas of functions that the template shows the model.
        chat_template_kwargs: further variables for the template.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, object]] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None

    def tokens(
        self, conversation: Conversation, tokenizer: Tokenizer | None, *, most: int | None = None
    ) -> TokenArray:
        """Returns the prompt of `conversation`; `most` as of `Tokenizer.encode`.

        Raises:
            ConfigurationError: there is no tokenizer or no template, a message is wrong, or the
                template refuses the conversation, whose reason the message has.
        """
        from jinja2 import TemplateError

        if tokenizer is None:
            raise ConfigurationError(
                "messages: a chat needs a tokenizer, which the model's directory lacks"
            )
        if self.chat_template is None and not tokenizer.has_chat_template:
            raise ConfigurationError(
                "messages: the model has no chat template; give chat_template=, or a prompt to "
                "generate"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigurationError(
                "continue_final_message: needs add_generation_prompt=False; the answer either "
                "continues the last message or begins anew"
            )
        _check_list(conversation)
        messages = [_checked(message, number) for number, message in enumerate(conversation)]
        if not messages:
            raise ConfigurationError("messages: there are none; give at least one")
        try:
            text = tokenizer.render_chat(
                messages,
                chat_template=self.chat_template,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=None if self.tools is None else [dict(tool) for tool in self.tools],
                **(self.chat_template_kwargs or {}),
            )
        except (
            TemplateError,
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:  # a template is a program
            raise ConfigurationError(f"messages: the chat template failed: {error}") from error
        check_text("messages", text)
        return tokenizer.encode(text, most=most, special_tokens=False)


def _checked(message: Message, number: int) -> dict[str, object]:
    """Returns a copy of `message` whose content is text, as templates take it."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise ConfigurationError(
            f"{where}: a dict with 'role' and 'content' is needed, this is a "
            f"{type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigurationError(f"{where}: role={shown(role)} must be a string, as 'user'")
    content = _text(message.get("content"), f"{where}.content")
    if content is None and not (message.get("tool_calls") or message.get("function_call")):
        # A template would write "None" in its place.
        raise ConfigurationError(f"{where}: it has no content; give text, '' for none")
    return dict(message) | {"content": content}


def _text(content: object, where: str) -> str | None:
    """Returns the text of a message; its parts are joined by newlines, as vLLM does."""
    if content is None:
        return None
    if isinstance(content, str):
        check_text(where, content)
        return content
    if not isinstance(content, Sequence):
        raise ConfigurationError(
            f"{where}: a string or a list of text parts is needed, this is a "
            f"{type(content).__name__}"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(text, str) or (isinstance(part, Mapping) and kind not in _TEXT_PARTS):
            raise ConfigurationError(
                f"{where}: parts of type {shown(kind)} are not served; only text"
            )
        check_text(where, text)
        texts.append(text)
    return "\n".join(texts)
