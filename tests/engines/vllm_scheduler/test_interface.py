"""What was recorded of vLLM's interfaces is what this vLLM has."""

from __future__ import annotations

from recorded_interfaces import check_recorded


def test_the_recorded_interfaces_are_the_installed_ones():
    check_recorded("vllm")
