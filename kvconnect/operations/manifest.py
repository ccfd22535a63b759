"""The manifest of a file of ``export``: the models, geometries and tokens of its blocks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from kvconnect import frame
from kvconnect.backend import StoredBlock


@dataclass(slots=True)
class ModelPart:
    """The blocks of one model and cache geometry in a file.

    Attributes:
        digest: the first 16 bytes of the model's digest, hexadecimal.
        geometry: 16 bytes that stand for the geometry of its cache, hexadecimal.
        layouts: fingerprints of the layouts of the frames, hexadecimal, sorted.
        blocks, bytes: the blocks and the bytes of their frames.
        tokens: of the blocks of pool group 0.
    """

    digest: str
    geometry: str
    layouts: list[str] = field(default_factory=list)
    blocks: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, block: StoredBlock) -> None:
        """Counts `block`."""
        self.blocks += 1
        self.bytes += block.data.numel()
        if block.group == 0 and block.tokens is not None:
            self.tokens += len(block.tokens)
        layout = frame.check_header(block.data, block.key, None).fingerprint.hex()
        if layout not in self.layouts:
            self.layouts = sorted([*self.layouts, layout])


@dataclass(slots=True)
class Manifest:
    """The contents of a file by model; the keys are the models' tags, hexadecimal."""

    models: dict[str, ModelPart] = field(default_factory=dict)

    def add(self, block: StoredBlock) -> None:
        """Counts `block`."""
        tag = block.model.hex()
        self.models.setdefault(tag, ModelPart(tag[:32], tag[32:])).add(block)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(part.blocks for part in self.models.values())

    def to_bytes(self) -> bytes:
        """Returns the manifest as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()
