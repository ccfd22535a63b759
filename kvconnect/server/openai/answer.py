"""What completions and chats have in common, as clients get it."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvconnect.engine.request.output import CompletionOutput, RequestOutput, StreamChunk
from kvconnect.server.openai.usage import usage_of

__all__ = ["Answer"]


class Answer(ABC):
    """The JSON objects that answer one request.

    Args:
        model: its name.
        completions: how many come out of the request; choices count from 0 over all its prompts.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, completions: int) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._completions = completions

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All of it at once."""
        completions = [one for output in outputs for one in output.outputs]
        choices = [self._choice(index, one) for index, one in enumerate(completions)]
        return self._object(self.kind, choices) | {"usage": usage_of(outputs)}

    def beginning(self) -> Iterable[dict[str, Any]]:
        """What a stream begins with, before any token."""
        return ()

    def chunk(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """What came of choice `index`."""
        return self._object(self.chunk_kind, [self._part(index, chunk)])

    def end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The last chunk, if the counts of tokens are wanted."""
        return self._object(self.chunk_kind, []) | {"usage": usage_of(outputs)}

    @abstractmethod
    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, index: int, chunk: StreamChunk) -> dict[str, Any]: ...

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
