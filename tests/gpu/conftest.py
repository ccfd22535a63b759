"""Where these tests run: on a CUDA device, and on the CPU as a rehearsal, in the long forms."""

from __future__ import annotations

import pytest
import torch

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="NO CUDA DEVICE: not run on one"
            ),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param
