"""The main job: stop, start again, and only the last prompt token is computed."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness import PARAMS, PROMPT, T, answer, disk_url, open_llm

from kvconnect import SamplingParams


def test_second_process_computes_the_last_prompt_token_only(
    model: Path, master_store: Path, expected: list[int], tmp_path: Path
) -> None:
    # The prompt's last block was completed by generated tokens: 203 + 23 tokens end in block 14.
    assert len(PROMPT) % T != 0
    again = answer(model, disk_url(master_store))
    assert list(again.output_token_ids) == expected
    assert again.reused_store_tokens == len(PROMPT) - 1
    assert again.reused_device_tokens == 0
    assert again.computed_tokens == 1


def test_every_prompt_length_comes_back_but_for_its_last_token(model: Path, tmp_path: Path) -> None:
    lengths = [1, 2, T - 1, T, T + 1, 2 * T, 2 * T + 1, 5 * T - 1]
    prompts = [PROMPT[number : number + length] for number, length in enumerate(lengths)]
    answers = []
    for _ in range(2):
        with open_llm(model, disk_url(tmp_path / "store")) as llm:
            outputs = llm.generate(prompts, PARAMS)
        answers.append([one.output_token_ids for one in outputs])
    assert answers[0] == answers[1]
    assert [one.reused_store_tokens for one in outputs] == [length - 1 for length in lengths]


def test_a_longer_prompt_reuses_its_stored_beginning(model: Path, tmp_path: Path) -> None:
    store = disk_url(tmp_path / "store")
    answer(model, store, prompt=PROMPT[:90])
    reference = answer(model)
    extended = answer(model, store)
    assert extended.output_token_ids == reference.output_token_ids
    assert extended.reused_store_tokens == 90  # the partial tail, too


def test_the_same_model_in_another_directory_hits(
    model: Path, master_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "moved")
    shutil.copytree(master_store, tmp_path / "store")
    assert answer(tmp_path / "moved", disk_url(tmp_path / "store")).computed_tokens == 1


def test_another_salt_never_hits(model: Path, tmp_path: Path, expected: list[int]) -> None:
    store = disk_url(tmp_path / "store")
    for salt, reused in (("a", 0), ("b", 0), (None, 0), ("a", len(PROMPT) - 1)):
        with open_llm(model, store) as llm:
            output = llm.generate([PROMPT], PARAMS, cache_salt=salt)[0]
        assert list(output.output_token_ids) == expected
        assert output.reused_store_tokens == reused, salt


def test_many_requests_at_once_come_back(model: Path, tmp_path: Path) -> None:
    store = disk_url(tmp_path / "store")
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(6)] + [[*PROMPT[:100], i] for i in range(6)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = []
    for url in (None, store, store):
        with open_llm(model, url, max_tokens=4096) as llm:
            outputs.append(llm.generate(prompts, params))
    tokens = [[o.output_token_ids for o in run] for run in outputs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(o.computed_tokens == 1 for o in outputs[2])
