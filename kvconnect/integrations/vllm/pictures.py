"""The pictures, sounds and videos of a prompt, named by their content.

vLLM's identifiers may be the client's own ``uuid``, hashes of it, numbers of a request, or hashes
of content. They do not show which. So the input of the model is hashed here.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvconnect.digest.doubts import Doubt
from kvconnect.integrations.core.requests import PromptContent

_MOST_KNOWN = 1 << 17
"""Identifiers; more than vLLM keeps blocks or outputs of encoders of."""


class FeatureDigests:
    """The digests of inputs beside tokens, made on a thread.

    vLLM reuses the output of an encoder, and blocks of its own cache, by the identifier. So a
    feature is not cached if its identifier was another content's before: the result could be of
    either. Belongs to one thread.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "kvconnect-pictures")  # started by the first feature

    def start(self, features: Sequence[Any]) -> Future[list[PromptContent] | Doubt]:
        """Starts to hash `features`, in the order of calls; does not block.

        Args:
            features: vLLM's ``MultiModalFeatureSpec`` of every new request that has some, also of
                those that are not cached.

        Returns:
            Their positions in the prompt and their digests; or why they have none.
        """
        # Copies: vLLM drops the data of features that were encoded.
        return self._thread.submit(self._contents, [copy(feature) for feature in features])

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ on the thread

    def _contents(self, features: Sequence[Any]) -> list[PromptContent] | Doubt:
        found: list[PromptContent] = []
        doubt: Doubt | None = None
        for feature in features:
            digest = _digest(feature)
            if not self._is_own(str(feature.identifier), digest):
                doubt = doubt or Doubt.USER_IDENTIFIER
            if digest is None:
                doubt = doubt or Doubt.CONTENT_UNKNOWN
            else:
                place = feature.mm_position
                found.append(PromptContent(place.offset, place.length, digest))
        return doubt or found

    def _is_own(self, identifier: str, digest: bytes | None) -> bool:
        """Records that `identifier` is of this content; returns False if it is another's, too."""
        content = digest or b""
        before = self._known.get(identifier)
        if before is None:
            while len(self._known) >= _MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(identifier)
        if before not in (None, content):
            content = b""  # equal to none
        self._known[identifier] = content
        return before in (None, content) and bool(content)


def _digest(feature: Any) -> bytes | None:
    """Returns the digest of the model's input; ``None`` if it is not here, or not known."""
    data, place = feature.data, feature.mm_position
    if feature.modality == "prompt_embeds" or not isinstance(data, Mapping) or not data:
        return None
    if "address" in data:  # in memory that workers share: the content is present
        return None
    state = hashlib.blake2b(digest_size=32, person=b"kvc-feature")
    try:
        _update(state, str(feature.modality))
        _update(state, getattr(place, "is_embed", None))
        for name in sorted(data):
            value = data[name].data
            if value is None:  # vLLM's reference: the content is elsewhere
                return None
            _update(state, str(name))
            _update(state, value)
    except TypeError:  # an unknown kind
        return None
    return state.digest()


def _update(state: Any, value: object) -> None:
    """Hashes `value` so that no two values look alike.

    Raises:
        TypeError: it is, or holds, something else than tensors, arrays, numbers and text.
    """
    if isinstance(value, Tensor):
        _update_tensor(state, value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        _update_tensor(state, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, (list, tuple)):
        state.update(b"l" + struct.pack("<q", len(value)))
        for one in value:
            _update(state, one)
    elif isinstance(value, Mapping):
        state.update(b"m" + struct.pack("<q", len(value)))
        for name in sorted(value):
            _update(state, name)
            _update(state, value[name])
    elif value is None or isinstance(value, (bool, int, float, str)):
        text = f"{type(value).__name__}:{value!r}".encode("utf-8", "surrogatepass")
        state.update(b"v" + struct.pack("<q", len(text)) + text)
    else:
        raise TypeError(f"{type(value).__name__} cannot be hashed")


def _update_tensor(state: Any, tensor: Tensor) -> None:
    kind = f"{tensor.dtype}{list(tensor.shape)}".encode()
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    state.update(b"t" + struct.pack("<qq", len(kind), content.nbytes) + kind)
    state.update(content.data)
