"""What importing the package brings in, each asked of a new process in the checkout's root."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import kvconnect


def run(arguments: list[str], directory: Path) -> str:
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_kvconnect_brings_its_vocabulary_and_needs_no_extra(repository: Path):
    source = """
import sys
extras = ("transformers", "tokenizers", "safetensors", "redis", "boto3", "nixl", "numba",
          "prometheus_client", "pytest", "hypothesis", "opentelemetry")
for name in extras:
    sys.modules[name] = None  # importing it raises
import kvconnect
assert not set(kvconnect.__all__) - set(dir(kvconnect))
assert kvconnect.config.KvCacheConfig is kvconnect.KvCacheConfig
import kvconnect.backends.registry, kvconnect.connector.runtime.manager
import kvconnect.cache.kv_cache_manager, kvconnect.cli.main
kvconnect.open_backend("memory:?capacity=1MiB")
kvconnect.cli.main.make_parser()
try:
    kvconnect.LLM
except kvconnect.ConfigurationError as error:
    print(error)
for url in ("s3://bucket/kv", "redis://host"):
    try:
        kvconnect.open_backend(url)
    except kvconnect.ConfigurationError as error:
        print(error)
"""
    said = run(["-c", source], repository)
    assert all(f"pip install '.[{extra}]'" in said for extra in ("hf", "s3", "redis"))


TRANSFORMERS_AND_KVCONNECT = """
import sys
import transformers.integrations.hub_kernels
from transformers.utils import is_kernels_available
import kvconnect.kernels.copy
"""


@pytest.mark.slow  # as a script; from the folder itself: the next test
def test_the_package_kernels_of_transformers_is_not_looked_for_in_the_checkout(
    repository: Path, tmp_path: Path
):
    # As a command or a script does it: the working directory is no place to import from.
    if not _installed():
        pytest.skip("kvconnect is not installed here, only found in the working directory")
    script = tmp_path / "script.py"
    script.write_text(
        TRANSFORMERS_AND_KVCONNECT + 'from kvconnect import LLM\nprint("kernels" in sys.modules)'
    )
    assert run([str(script)], repository) == "False"


def test_the_folder_kernels_is_never_taken_for_that_package(repository: Path):
    # ``python -c`` and ``python -m`` do import from the working directory. transformers then meets
    # the folder; without an __init__.py it holds no module, and is no package to use.
    source = (
        TRANSFORMERS_AND_KVCONNECT
        + """
found = sys.modules.get("kernels")
print(getattr(found, "__file__", None), is_kernels_available())
"""
    )
    assert not (repository / "kernels/__init__.py").exists()
    assert run(["-c", source], repository) == "None False"


def _installed() -> bool:
    try:
        distribution("kvconnect")
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        *("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "SchedulerOutput"),
        *("BlockManager", "KVCacheManager"),
    ],
)
def test_the_classes_that_the_documents_name_come_from_the_package_itself(name):
    assert getattr(kvconnect, name).__name__ == name
    assert name in kvconnect.__all__
    assert name in dir(kvconnect)
