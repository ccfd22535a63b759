"""What the tests here have in common: prompts and limits."""

from vllm_engine import prompts_of

PROMPTS = prompts_of(200, 90, 33, 15)
WHOLE = [192, 80, 32, 0]
"""What of them can be loaded: whole blocks, never the last token."""
LIMITS = {"lookup_timeout_ms": 1000.0, "load_timeout_s": 1.0, "save_timeout_s": 1.0}
