"""The verbs on the prompts of a store, in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property
from math import inf
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvconnect.errors import ConfigurationError
from kvconnect.operations.drop import drop
from kvconnect.operations.pin import pin
from kvconnect.operations.result import Exported, Pinned, Result, Saved
from kvconnect.operations.run import run_anywhere
from kvconnect.operations.selection import is_digest, model_prefix
from kvconnect.operations.tenants import TenantUse, each_tenant
from kvconnect.operations.visit import listed, visiting
from kvconnect.operations.which import Wanted, Which, check_names, prompts_to_warm, wanted_blocks
from kvconnect.tokens import TokenArray, as_token_array

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.request.chat import Conversation
    from kvconnect.engine.request.prompts import Prompt
    from kvconnect.engine.request.tokenizer import Tokenizer
    from kvconnect.operations.explain import StoredPrompt
    from kvconnect.operations.export import Sink


class PromptStore:
    """The prompts of a store: explains, warms, drops, exports, imports, pins, prefetches them.

    Every verb opens the store, blocks until it is done, and closes the store. An engine that has
    the store open is not disturbed. All verbs are idempotent, and may be repeated after an
    interruption.

    Args:
        url: the URL of the store.
        model: the directory of a model, its name in the local Hugging Face cache, or the first
            digits of its digest as ``kvconnect ls`` shows them. The verbs then apply to its blocks
            only; text and conversations need its tokenizer. ``None``: blocks of any model.
        model_revision: the engines' setting of that name, if they have one.
        run: runs the coroutine of a verb to its end; blocks.

    Raises:
        ConfigurationError: there is no such model.
    """

    def __init__(
        self,
        url: str,
        model: str | PathLike[str] | None = None,
        *,
        model_revision: str | None = None,
        run: Callable[[Coroutine[Any, Any, None]], None] = run_anywhere,
    ) -> None:
        self.url = url
        self._run = run
        self._directory: Path | None = None
        text = None if model is None else fspath(model)
        if text is not None and (Path(text).is_dir() or not is_digest(text)):
            from kvconnect.engine.checkpoint.hub_cache import model_directory

            self._directory = model_directory(text)
            text = str(self._directory)
        self._model = model_prefix(text, model_revision)
        self._revision = model_revision

    def warm(
        self, llm: LLM | None = None, *, into: Saved | None = None, **which: Unpack[Which]
    ) -> Saved:
        """Computes and saves the blocks of prompts that the store lacks.

        Args:
            llm: computes and saves; its store must be this one. ``None``: an `LLM` of the model is
                opened for it, with the defaults of `LLM`, and closed.
            into: the result, whose counts grow meanwhile; default: a new one.
            which: prompts or messages, with their salt and adapter.

        Raises:
            ConfigurationError: `which` gives no prompt, there is no model directory, or a prompt
                does not fit the model; or the store cannot list its blocks.
            BackendUnavailable: the store fails; blocks saved before stay.
        """
        from kvconnect.engine.llm import LLM
        from kvconnect.operations.warm import check_store, connector_to, warm

        prompts = prompts_to_warm(which, self._prompts(which))
        done = Saved() if into is None else into
        if llm is not None:
            self._run(warm(self.url, prompts, llm, done))
            return done
        if self._directory is None:
            raise ConfigurationError("model: warm needs a model's directory or name")
        self._run(check_store(self.url))
        connector = connector_to(self.url)
        with LLM(self._directory, connector=connector, model_revision=self._revision) as made:
            self._run(warm(self.url, prompts, made, done))
        return done

    def drop(
        self,
        *,
        continued: bool = False,
        dry_run: bool = False,
        before: Callable[[], None] | None = None,
        into: Result | None = None,
        **which: Unpack[Which],
    ) -> Result:
        """Deletes blocks; also pinned ones, and from every tier of a tiered store.

        Args:
            continued: delete also the blocks that continue the prompts or keys.
            dry_run: only count.
            before: called once, on another thread, when the arguments are checked and the store is
                open; not with `dry_run`.
            into: the result, whose counts grow meanwhile; default: a new one.
            which: the blocks; see `Which`.

        Raises:
            ConfigurationError: `which` is empty, or the store cannot list its blocks.
            BackendUnavailable: the store fails, or a tier does not answer; blocks deleted before
                stay deleted.
        """
        done = Result() if into is None else into
        wanted = self._wanted(which, continued=continued)
        self._run(drop(self.url, wanted, done, dry_run=dry_run, before=before))
        return done

    def explain(
        self,
        prompt: Prompt,
        *,
        salt: str | None = None,
        lora: str | None = None,
        tokens_per_block: int | None = None,
    ) -> StoredPrompt:
        """Returns the stored tokens of one prompt, and the reasons why others are not used.

        Lists all blocks of the store. The store is only read.

        Args:
            prompt: text or token ids.
            salt: the salt of the request; ``None``: it has none.
            lora: its adapter; ``None``: it has none.
            tokens_per_block: the tokens per block of its engine; ``None``: any.

        Raises:
            ConfigurationError: there is no model, the prompt or the salt is wrong, or the store
                cannot list its blocks.
            BackendUnavailable: the store fails.
        """
        from kvconnect.operations.explain import explain, identity_of, with_texts

        if self._model is None:
            raise ConfigurationError("model: is needed to explain a prompt")
        tokens = self.tokens(prompt)
        wanted = identity_of(
            self.url,
            self._model,
            None if self._directory is None else (self._directory, self._revision),
            salt=salt,
            lora=lora,
            tokens_per_block=tokens_per_block,
        )
        found = run_anywhere(explain(self.url, tokens, wanted))
        return with_texts(found, tokens, self._tokenizer)

    def pin(
        self, *, for_s: float | None = None, into: Pinned | None = None, **which: Unpack[Which]
    ) -> Pinned:
        """Pins blocks: the store does not drop them for room or for their age.

        All pinned blocks together take no more than a share of the store's capacity
        (``pin_fraction=`` in its URL, 0.5 by default). Pins survive restarts. With keys, the blocks
        before theirs are pinned, too. Of a tiered store every tier that has pins pins what it has.

        Args:
            for_s: seconds from now, in place of an earlier pin's; ``None``: until `unpin`.
            into: the result, whose counts grow meanwhile; default: a new one.
            which: the blocks; see `Which`.

        Raises:
            ConfigurationError: `which` is empty, or the store has no pins, or cannot list its
                blocks.
            BackendUnavailable: the store fails; blocks pinned before stay pinned.
        """
        if for_s is not None and not for_s > 0:
            raise ConfigurationError(f"for_s={for_s}: must be above 0 seconds")
        done = Pinned() if into is None else into
        until = inf if for_s is None else time.time() + for_s
        self._run(pin(self.url, self._wanted(which, ancestors=True), until, done))
        return done

    def unpin(self, *, into: Pinned | None = None, **which: Unpack[Which]) -> Pinned:
        """Unpins blocks; returns the counts of those that were pinned.

        With keys, the blocks before theirs stay pinned: other prompts may need them.

        Args:
            into: the result, whose counts grow meanwhile; default: a new one.
            which: the blocks; see `Which`.

        Raises:
            ConfigurationError: `which` is empty, or the store has no pins, or cannot list its
                blocks.
            BackendUnavailable: the store fails; blocks unpinned before stay unpinned.
        """
        done = Pinned() if into is None else into
        self._run(pin(self.url, self._wanted(which), None, done))
        return done

    def tenants(self, names: Mapping[bytes, str] | None = None) -> list[TenantUse]:
        """Returns the use that each tenant makes of the whole store, whatever the model.

        Args:
            names: the names of tenants, by their `kvconnect.keys.salt_tag`.

        Raises:
            ConfigurationError: the store cannot list its blocks.
            BackendUnavailable: the store fails.
        """

        async def found() -> list[TenantUse]:
            async with visiting(self.url, "read") as store:
                return await each_tenant(listed(self.url, store), names or {})

        return run_anywhere(found())

    def export(
        self,
        path: str | PathLike[str] | Sink,
        *,
        key_file: str | None = None,
        into: Exported | None = None,
        **which: Unpack[Which],
    ) -> Exported:
        """Writes blocks to one file, which `import_` saves to another store.

        The file is ``PATH.part`` until it is complete; a repeated call continues it. With keys, the
        blocks before theirs are written, too.

        Args:
            path: of the file; or a stream that takes its bytes.
            key_file: a file with a secret of 32 bytes or more that authenticates the file.
            into: the result, whose counts grow meanwhile; default: a new one.
            which: the blocks; see `Which`.

        Raises:
            ConfigurationError: `which` is empty, the file cannot be written, or the store cannot
                list its blocks.
            BackendUnavailable: the store fails.
            BadFrame: damaged blocks were left out; the file is complete otherwise.
        """
        from kvconnect.operations.export import Sink, export

        done = Exported() if into is None else into
        wanted = self._wanted(which, ancestors=True)
        to = path if isinstance(path, Sink) else Path(path)
        self._run(export(self.url, wanted, to, done, key_file=key_file))
        return done

    def import_(
        self, path: str | PathLike[str], *, key_file: str | None = None, into: Saved | None = None
    ) -> Saved:
        """Saves the blocks of an exported file, after all of the file was checked.

        Blocks that the store has are skipped, so a repeated call continues an interrupted one.

        Args:
            path: the path of the file.
            key_file: the key file that it was made with.
            into: the result, whose counts grow meanwhile; default: a new one.

        Raises:
            BadFrame: the file is damaged, cut short, changed, or made with another key.
            ConfigurationError: it cannot be opened, or has blocks of another model than this one's.
            BackendUnavailable: the store fails.
            RetryLater: the store accepts no more blocks.
        """
        from kvconnect.operations.import_ import import_file

        done = Saved() if into is None else into
        self._run(import_file(self.url, Path(path), done, model=self._model, key_file=key_file))
        return done

    def prefetch(self, *, into: Saved | None = None, **which: Unpack[Which]) -> Saved:
        """Copies blocks of a tiered store to its fastest tier that outlives this process.

        With keys, the blocks before theirs are copied, too. Blocks that the tier has are skipped.

        Args:
            into: the result, whose counts grow meanwhile; default: a new one.
            which: the blocks; see `Which`.

        Raises:
            ConfigurationError: `which` is empty, the store has no faster tier to copy to, or a tier
                cannot list its blocks.
            BackendUnavailable: a tier fails; blocks copied before stay.
            RetryLater: the tier accepts no more blocks.
            BadFrame: damaged blocks were left out; all others are copied.
        """
        from kvconnect.operations.prefetch import prefetch

        done = Saved() if into is None else into
        self._run(prefetch(self.url, self._wanted(which, ancestors=True), done))
        return done

    def tokens(self, prompt: Prompt) -> TokenArray:
        """Returns the token ids of a prompt, as an engine with the model computes them.

        Raises:
            ConfigurationError: `prompt` is text, and there is no tokenizer.
        """
        from kvconnect.engine.request.prompts import as_text_or_tokens

        content = as_text_or_tokens(prompt)
        if not isinstance(content, str):
            return as_token_array(content)
        if self._tokenizer is None:
            raise ConfigurationError(
                "prompts: text needs a model directory with a tokenizer; give it, or token ids"
            )
        return self._tokenizer.encode(content)

    def chat_tokens(self, conversation: Conversation) -> TokenArray:
        """Returns the token ids of a conversation, by the model's own chat template.

        Raises:
            ConfigurationError: there is no tokenizer or template, or a message is wrong.
        """
        from kvconnect.engine.request.chat import ChatFormat

        return ChatFormat().tokens(conversation, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        from kvconnect.engine.request.tokenizer import Tokenizer

        return None if self._directory is None else Tokenizer.of(self._directory)

    def _wanted(self, which: Which, *, continued: bool = False, ancestors: bool = False) -> Wanted:
        """Returns the choice of blocks that `which` makes.

        Raises:
            ConfigurationError: `which` is empty, or names blocks in two ways.
        """
        check_names(which)
        prompts = self._prompts(which)
        return wanted_blocks(which, prompts, self._model, continued=continued, ancestors=ancestors)

    def _prompts(self, which: Which) -> list[TokenArray]:
        """Returns the token ids of the prompts and conversations of `which`."""
        from kvconnect.engine.request.chat import as_conversations
        from kvconnect.engine.request.prompts import as_prompts

        prompts = as_prompts(which["prompts"]) if "prompts" in which else []
        found = [*map(self.tokens, prompts)]
        chats = as_conversations(which["messages"]) if "messages" in which else []
        return [*found, *map(self.chat_tokens, chats)]
