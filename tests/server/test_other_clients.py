"""Other projects' clients against a server, unmodified: each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from server_process import ServerProcess, running

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "clients"
DEADLINE_S = 300


@pytest.fixture(scope="module")
def lively(model, tmp_path_factory):
    """A server with a store that takes as many requests at once as clients send."""
    directory = tmp_path_factory.mktemp("clients")
    options = ("--store", f"disk:{directory}/kv", "--kv-cache-tokens", "65536")
    with running(model, directory / "output", *options) as server:
        yield server


def program_of(environment: str, name: str) -> Path:
    """A program of the environment of some clients; skips loudly where there is none."""
    program = ROOT / ".venv-clients" / environment / "bin" / name
    if not program.exists():
        pytest.skip(f"{program} is not there: make test-clients makes it")
    return program


def run(*command: object, directory: Path) -> None:
    """Run a client to its end; fails with what it printed."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)),
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    ("environment", "script"),
    [
        ("api", "instructor_client"),
        ("api", "langchain_client"),
        ("api", "litellm_client"),
        ("api", "llama_index_client"),
        ("lm_eval", "lm_eval_client"),
    ],
)
def test_a_client_works(lively: ServerProcess, tmp_path: Path, environment: str, script: str):
    python = program_of(environment, "python")
    run(python, SCRIPTS / f"{script}.py", lively.url, directory=tmp_path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures(lively: ServerProcess, model: Path, tmp_path: Path, path: str):
    report = tmp_path / "report.json"
    run(
        program_of("guidellm", "guidellm"),
        "run",
        f"--backend=kind=openai_http,target={lively.url},model=tiny,request_format={path}",
        "--profile=kind=concurrent,streams=2",
        "--constraint=kind=max_requests,count=6",
        f"--tokenizer=kind=huggingface_auto,model={model}",
        "--data=kind=synthetic_text,prompt_tokens=64,output_tokens=8",
        f"--output=kind=json,path={report}",
        "--disable-console",
        directory=tmp_path,
    )
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)
