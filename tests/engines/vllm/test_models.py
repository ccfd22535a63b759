"""Windows, several KV cache groups, latents: served where the pair can, token for token."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from vllm_engine import BLOCK, connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 40)


@pytest.mark.planted("blocks-passed-by-window", "vllm", "equal")
@pytest.mark.parametrize(("arch", "num_groups"), [("mistral", 1), ("gemma3", 2)])
def test_windows_and_several_groups(make_vllm_model, tmp_path, arch, num_groups):
    """A load that fails is of no use at all there: everything is computed."""
    model = make_vllm_model(arch, sliding_window=48, num_layers=6)
    with engine(model, connector(f"faulty://windows{tmp_path}", load_timeout_s=2.0)) as made:
        assert sum(made.inside(inside.num_groups)) >= num_groups
        cold = made.answer(PROMPTS)
        wanted = [one.tokens for one in cold]
        made.flush()
        made.forget_device()
        made.check(PROMPTS, wanted, [12 * BLOCK, 6 * BLOCK, BLOCK])
        for fault in ("swap", "raise"):
            made.forget_device()
            made.inside(inside.plant, "windows", fault, ["load"])
            failed = made.answer(PROMPTS)
            assert [one.tokens for one in failed] == wanted
            made.inside(inside.heal, "windows")
        made.check_empty()
        made.forget_device()
        longer = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, wanted, strict=True)]
        made.answer(longer, 60)
    with engine(model, None) as plain:
        assert plain.tokens(PROMPTS) == wanted


def test_a_device_hit_and_a_store_hit_together(make_vllm_model, store):
    """What the device still has is not loaded; what follows it is."""
    model = make_vllm_model("gemma3", sliding_window=48, num_layers=6)
    long, other = prompts_of(600, 300)
    with engine(model, connector(store)) as made:
        [wanted] = made.tokens([long])
        made.flush()
        made.forget_device()
        made.answer([long[: 10 * BLOCK + 1]])
        [answer] = made.answer([long])
        assert answer.tokens == wanted
        assert answer.cached == 18 * BLOCK
        made.answer([other])
