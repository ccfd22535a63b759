"""A chat template that replaces the model's own."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvconnect.engine.llm import LLM
from kvconnect.errors import ConfigurationError

__all__ = ["read_template", "use_template"]


def read_template(path: str) -> str:
    """Returns the template in the file `path`.

    Raises:
        ConfigurationError: the file cannot be read, or is no Jinja template.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template: '{path}' cannot be read ({error})") from error
    # Like transformers, whose templates use `{% generation %}` and `{% break %}`.
    extensions = ["jinja2.ext.loopcontrols"]
    plain = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        ImmutableSandboxedEnvironment(extensions=extensions).parse(plain)
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"--chat-template: '{path}' is no template: line {error.lineno}: {error}"
        ) from error
    return text


def use_template(llm: LLM, template: str) -> None:
    """Makes `template` format the chats of `llm`.

    Raises:
        ConfigurationError: the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigurationError(
            "--chat-template: a chat needs a tokenizer, which the model's directory lacks"
        )
    llm.tokenizer.use_chat_template(template)
