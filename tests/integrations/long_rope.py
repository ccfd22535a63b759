"""What a model's configuration says of ``longrope``."""

from __future__ import annotations

LONG = {
    "rope_parameters": None,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
}
