"""The requests of an engine for the built-in pair: tokens, and other inputs that shape KV."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.config import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.data import LlmArgs
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.keys import KEY_NBYTES, BlockKey, KeyChain, Namespace, chain_keys, root_key
from kvconnect.request import LlmRequest
from kvconnect.shards import whole_layouts
from kvconnect.tokens import LateTokens, TokenArray, TokenBuffer

PRIORITY = DEFAULT_RETENTION_PRIORITY
"""The priority of every block: engines do not rank blocks."""


@dataclass(frozen=True, slots=True)
class PromptContent:
    """A content of a prompt that its tokens do not identify, such as a picture.

    Attributes:
        start: its first token.
        length: in tokens.
        digest: the digest of the whole content; not empty.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or not self.digest:
            raise ConfigurationError(
                f"PromptContent: start={self.start}, length={self.length}, {len(self.digest)} "
                "bytes of digest; a start of at least 0, a length of at least 1 and a digest are "
                "needed"
            )


class MixedKeyChain(KeyChain):
    """The keys of a prompt with contents, from the first block on that a content touches.

    A block without any content has the key that follows from its tokens and its parent.
    """

    __slots__ = ("_mixed",)

    def __init__(
        self,
        root: BlockKey,
        tokens_per_block: int,
        tokens: TokenBuffer,
        contents: Sequence[PromptContent],
    ) -> None:
        super().__init__(root, tokens_per_block, tokens)
        self._mixed = _by_block(contents, tokens_per_block)

    def tail(self, num_tokens: int) -> BlockKey:
        """Returns the key of `KeyChain.tail`, mixed with the contents of the partial block."""
        key = super().tail(num_tokens)
        mixed = self._mixed.get(num_tokens // self.tokens_per_block)
        return key if mixed is None else BlockKey(_with_content(key, mixed))

    def _over(self, tokens: TokenBuffer) -> KeyChain:
        chain = MixedKeyChain(self.root, self.tokens_per_block, tokens, ())
        chain._mixed = self._mixed
        return chain

    def _hash_up_to(self, stop: int) -> None:
        known, size = self.num_hashed, self.tokens_per_block
        while known < stop:
            mixed = self._mixed.get(known)
            # Blocks of text alone in one go, up to the next that is touched.
            end = known + 1 if mixed else min((n for n in self._mixed if n > known), default=stop)
            end = min(end, stop)
            tokens = self._tokens.view[known * size : end * size].tobytes()
            keys = chain_keys(self._key_before(known), tokens, size)
            self._digests += keys if mixed is None else _with_content(keys, mixed)
            known = end


def _by_block(contents: Sequence[PromptContent], tokens_per_block: int) -> Mapping[int, bytes]:
    """Returns for each block with contents a digest of these and of their positions."""
    states: dict[int, list[bytes]] = {}
    for one in sorted(contents, key=lambda one: (one.start, one.length, one.digest)):
        first, last = (
            one.start // tokens_per_block,
            (one.start + one.length - 1) // tokens_per_block,
        )
        for number in range(first, last + 1):
            place = f"{one.start - number * tokens_per_block},{one.length},{len(one.digest)};"
            states.setdefault(number, []).append(place.encode() + one.digest)
    return {
        number: hashlib.blake2b(
            b"".join(parts), digest_size=KEY_NBYTES, person=b"kvc-content"
        ).digest()
        for number, parts in states.items()
    }


def _with_content(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(key + content, digest_size=KEY_NBYTES, person=b"kvc-mixed").digest()


def extra_key_of(settings: EngineSettings, variant: Mapping[str, str] | None = None) -> str | None:
    """Returns the `Namespace.extra_key` that separates an engine's blocks from other ones.

    Args:
        settings: the adapter's; a shared namespace leaves the engine out.
        variant: settings besides model and layout that change KV, by name: quantisation, overridden
            settings of the model. They separate blocks in a shared namespace, too.
    """
    parts = [] if settings.is_shared else [f"engine={settings.engine}"]
    parts += [f"{name}={value}" for name, value in sorted((variant or {}).items())]
    return ";".join(parts) or None


@dataclass(slots=True)
class RequestMaker:
    """Makes the pair's requests.

    Args:
        llm_args: the arguments of the pair; layouts of a rank will do.
        extra_key: see `extra_key_of`.
    """

    llm_args: LlmArgs
    extra_key: str | None
    _name: str | None = None
    _next_id: int = 0
    _known: dict[str | None, tuple[Namespace, BlockKey]] = field(default_factory=dict)

    def make(
        self,
        tokens: TokenArray | LateTokens,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        contents: Sequence[PromptContent] = (),
    ) -> LlmRequest:
        """Returns a request with an id of its own.

        Args:
            tokens: the tokens of the prompt, not changed; late ones are converted on the thread
                that first reads them, usually the store's.
            cache_salt: the tenant's.
            adapter: digest of the LoRA adapter's files.
            contents: the contents that tokens do not identify.

        Raises:
            ConfigurationError: there are no tokens, or the salt is none.
        """
        namespace, root = self.root(cache_salt, adapter)
        size = self.llm_args.tokens_per_block
        request = LlmRequest(
            self._next_id,
            tokens,
            chain_root=root,
            tokens_per_block=size,
            namespace=namespace,
        )
        self._next_id += 1
        if contents:
            request.key_chain = MixedKeyChain(root, size, request.tokens, contents)
        return request

    def separate(self, name: str) -> None:
        """Adds `name` to all keys from now on, in place of an earlier name."""
        self._name = name
        self._known.clear()

    def root(
        self, cache_salt: str | None = None, adapter: str | None = None
    ) -> tuple[Namespace, BlockKey]:
        """Returns a namespace and the key before its first block; cached if there is no salt."""
        if cache_salt is None and (known := self._known.get(adapter)) is not None:
            return known
        extra_key = ";".join(filter(None, (self.extra_key, self._name))) or None
        namespace = Namespace(cache_salt=cache_salt, lora_id=adapter, extra_key=extra_key)
        args = self.llm_args
        layouts = whole_layouts(args.layouts, args.place, args.num_kv_heads)
        found = namespace, root_key(args.model_digest, layouts, namespace)
        if cache_salt is None:  # there are as many salts as tenants
            self._known[adapter] = found
        return found
