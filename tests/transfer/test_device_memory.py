"""The same with memory of a CUDA device on either side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peer_process import MiB, pattern

from kvconnect.transfer.transport import Reads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: no transport was run on one"
    ),
]


@pytest.mark.parametrize("ours", ["cpu", "cuda"])
@pytest.mark.parametrize("theirs", ["cpu", "cuda"])
def test_device_memory_is_read_and_written(transport_of, peer_of, kind, ours, theirs):
    peer = peer_of(kind, seeds=[(1, 16 * MiB)], device=theirs)
    reader = transport_of(kind)
    memory = torch.zeros(16 * MiB, dtype=torch.uint8, device=ours)
    into = reader.register(memory)
    order = np.random.default_rng(0).permutation(256)
    reads = Reads(0, order * 65536, into, order[::-1] * 65536, 65536)
    reader.pull(reader.connect(peer.local), reads, deadline_s=60).done.result()
    found = memory.cpu().numpy().reshape(256, -1)
    assert np.array_equal(found[order[::-1]], pattern(1, 16 * MiB).reshape(256, -1)[order])
