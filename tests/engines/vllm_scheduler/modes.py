"""The ways in which vLLM makes its steps."""

MODES = ("v1", "v2", "v1-overlapping", "v2-overlapping")
"""Which of vLLM's model runners is told what, and whether a step is scheduled before the one before
it is over, as is the default on a GPU."""
