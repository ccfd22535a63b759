"""Loads a model, its tokenizer and its digest from one set of open files."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from kvconnect.digest.files import ModelFiles
from kvconnect.digest.model import check_revision, digest_of
from kvconnect.engine.model.model import Model
from kvconnect.engine.model.sharding import ModelRanks
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and digest.

    Attributes:
        model: the loaded model.
        tokenizer: its tokenizer; ``None`` if the directory has none.
        digest: the digest of the configuration and the weights that were loaded, 32 bytes.
    """

    model: Model
    tokenizer: Tokenizer | None
    digest: bytes

    @property
    def divided(self) -> list[str]:
        """The names of the recurrent states that ranks divide."""
        found = self.model.divided_states
        rows = () if found is None else found.rows
        return [f"{key.name} of layer {key.layer_idx}" for key in rows]


def load_model(
    directory: Path,
    *,
    dtype: str,
    device: str,
    revision: str | None = None,
    ranks: ModelRanks | None = None,
) -> LoadedModel:
    """Loads the model of `directory`; blocks until its weights are read and digested.

    Replacing the directory meanwhile has no effect, because files are opened once.

    Args:
        directory: the directory of the model.
        dtype: see `Model`.
        device: see `Model`.
        revision: replaces the weights in the digest; see `model_digest`.
        ranks: see `Model`.

    Raises:
        ConfigurationError: the directory, dtype, device or revision is wrong.
        UnsupportedModel: the model cannot be served; the message is the reason.
        ModelChanged: one of its files changed while it was read.
    """
    check_revision(revision)
    loaded: Future[LoadedModel] = Future()

    def load() -> None:
        try:
            loaded.set_result(_load(directory, dtype, device, revision, ranks))
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            loaded.set_exception(error)

    # OpenMP keeps a team of threads for every thread that ever computed. With the caller's beside
    # the engine's it counts more threads than cores, and puts them to sleep at every barrier: each
    # step would take a third longer. The team of a thread that ended is gone.
    threading.Thread(target=load, name="kvconnect-load", daemon=True).start()
    return loaded.result()


def _load(
    directory: Path, dtype: str, device: str, revision: str | None, ranks: ModelRanks | None
) -> LoadedModel:
    with ModelFiles(directory) as files, files.linked() as linked:
        try:
            model = Model(linked, dtype=dtype, device=device, ranks=ranks)
            tokenizer = Tokenizer.of(linked)
        except ConfigurationError as error:
            files.check()  # half-written files fail in many ways
            raise type(error)(str(error).replace(str(linked), str(directory))) from error
        digest = digest_of(files, revision=revision)
        files.check()
        return LoadedModel(model, tokenizer, digest)
