"""lm-eval, both kinds of tasks: log-likelihoods of prompts, and texts that are generated.

Asked twice, the second time of a cache that has it all, and once more of an empty cache: the
results are the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url = sys.argv[1]
LOGLIKELIHOOD = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATION = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def samples_of(model: str, base: str, task: str, tasks: Path) -> object:
    """What was asked and answered in each sample."""
    found = lm_eval.simple_evaluate(
        model,
        model_args={"model": "tiny", "base_url": f"{url}{base}", "num_concurrent": 2},
        tasks=[task],
        task_manager=TaskManager(include_path=str(tasks)),
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=model == "local-chat-completions",
    )
    samples = found["samples"][task]
    assert len(samples) == 6
    return [one["filtered_resps"] for one in samples]


def main() -> None:
    """Ask each kind of task three times."""
    with tempfile.TemporaryDirectory() as name:
        tasks = Path(name)
        data = tasks / "questions.json"
        shared = "A cache of keys and values keeps what was computed of a prompt. " * 3
        questions = [
            {
                "question": f"{shared}Number {at}?",
                "choices": [" yes", " no", " it may"],
                "answer": 1,
            }
            for at in range(6)
        ]
        data.write_text("\n".join(map(json.dumps, questions)))
        for task, text in (("choices", LOGLIKELIHOOD), ("texts", GENERATION)):
            (tasks / f"{task}.yaml").write_text(text.format(data=data))
        for model, base, task in (
            ("local-completions", "/v1/completions", "choices"),
            ("local-completions", "/v1/completions", "texts"),
            ("local-chat-completions", "/v1/chat/completions", "texts"),
        ):
            first, again = (samples_of(model, base, task, tasks) for _ in range(2))
            emptied = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
            urllib.request.urlopen(emptied, timeout=60).close()
            third = samples_of(model, base, task, tasks)
            assert first == again == third, (task, first, again, third)


if __name__ == "__main__":
    main()
