"""Each block of code of every page, the README first, runs alone, in a folder with a model.

Files that a page names (``# my_store.py``) lie there, too. Lines of shells are run if they end
soon; of others the options are parsed, and the files, extras and targets that they name must exist.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_process import running

from kvconnect.cli.main import main, make_parser
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.trace import metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\b")

SHELLS = ("sh", "console")
SHOWN = ("text", "promql", "toml", "json")
"""What is no code, or belongs to what stands before it."""

BY_ANOTHER_TEST = {"check.py": "tests/testing/test_guide.py"}
"""Files of pages whose processes other tests start."""

PARSED = ("serve", "route", "page", "top", "bench", "check")
"""Commands that do not end, or not soon."""

FOREIGN = ("export", "torchrun", "vllm", "curl")
"""What cannot be run here, or changes the shell alone."""


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        page: path of the page.
        line: where it begins there.
        language: as the page calls it.
        code: its lines.
    """

    page: Path
    line: int
    language: str
    code: str

    @property
    def file(self) -> str:
        """The name that the page gives it; empty if it has none."""
        named = NAMED.match(self.code)
        return named[1] if named else ""


def all_blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            Block(page, text.count("\n", 0, match.start()) + 1, *match.groups())
            for match in BLOCK.finditer(text)
        ]
    return found


def written_in(*languages: str) -> list[object]:
    chosen = [one for one in all_blocks() if one.language in languages]
    return [
        pytest.param(
            one,
            id=f"{one.page.name}:{one.line}",
            marks=[pytest.mark.slow] if "__main__" in one.code else [],  # it starts processes
        )
        for one in chosen
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("pages") / "model", "llama")


@pytest.fixture
def folder(model: Path, tmp_path: Path, block: Block, monkeypatch) -> Iterator[Path]:
    """Where `block` runs; modules and hooks that it brings into the process are gone afterwards."""
    if "make-model model" not in block.code:
        (tmp_path / "model").symlink_to(model)
    (tmp_path / "long.txt").write_text("Once upon a time " * 4, encoding="utf-8")
    for other in all_blocks():
        if other.page == block.page and other.language == "json":
            (tmp_path / "prompts.jsonl").write_text(other.code, encoding="utf-8")
        # The last one of a name is what the page ends with.
        if other.page == block.page and other.file:
            (tmp_path / other.file).write_text(other.code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(metrics, "_hooks", metrics._hooks)
    before, finders = set(sys.modules), sys.meta_path.copy()
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        place = getattr(sys.modules[name], "__file__", None) or ""
        if place.startswith(str(tmp_path)) or name.partition(".")[0] == "tensorrt_llm":
            del sys.modules[name]


def here(code: str, folder: Path) -> str:
    """`code` with places of this machine."""
    code = code.replace("/var/cache/kv", f"{folder}/kv").replace("s3://bucket/", f"disk:{folder}/")
    return re.sub(r"\b(9464|7600)\b", "0", code)


# ------------------------------------------------------------------------------------- Python


SERVER = "http://127.0.0.1:8000"


@pytest.mark.slow  # it starts a server
@pytest.mark.parametrize(
    "block", [one for one in all_blocks() if SERVER in one.code and one.language == "python"]
)
def test_a_block_that_asks_a_server_runs(block: Block, folder: Path, capsys):
    with running(folder / "model", folder / "output") as server:
        code = block.code.replace(SERVER, server.url).replace("MODEL", "tiny")
        (folder / "block.py").write_text(code, encoding="utf-8")
        runpy.run_path("block.py", run_name="__main__")
    assert capsys.readouterr().out.endswith("0\n")  # cached tokens


@pytest.mark.parametrize("block", written_in("python"))
def test_a_python_block_runs(block: Block, folder: Path, monkeypatch):
    if SERVER in block.code:
        compile(block.code, str(block.page), "exec")  # the test above runs it
        return
    if block.file in BY_ANOTHER_TEST:
        assert block.file in (ROOT / BY_ANOTHER_TEST[block.file]).read_text(encoding="utf-8")
        return
    if "from vllm import" in block.code:
        compile(block.code, str(block.page), "exec")  # tests/engines/vllm/test_lesson.py runs it
        return
    if "import tensorrt_llm" in block.code or "from tensorrt_llm" in block.code:
        from kvconnect.integrations import trtllm_shim

        trtllm_shim.install()  # it stands for TensorRT-LLM, which is not here
        monkeypatch.setenv("KVCONNECT_CONFIG", f'{{"url": "disk:{folder}/kv"}}')
    file = folder / (block.file or "block.py")
    file.write_text(here(block.code, folder), encoding="utf-8")
    # Files are there to be imported by others, or collected, but for those with a guard.
    is_script = not block.file or "__main__" in block.code
    runpy.run_path(str(file), run_name="__main__" if is_script else file.stem)


LESSON = ROOT / "docs/start/own-store.md"


@pytest.mark.parametrize("block", [one for one in all_blocks() if one.page == LESSON][:1])
def test_the_lesson_of_an_own_store_prints_what_it_says(block: Block, folder: Path, capsys):
    for _ in range(2):
        runpy.run_path("ask.py", run_name="__main__")
    shown = r"\d+ of \d+ tokens came from the store"
    said = re.findall(f"`({shown})`", LESSON.read_text(encoding="utf-8"))
    assert len(said) == 2
    assert re.findall(shown, capsys.readouterr().out) == said


# ------------------------------------------------------------------------------------- shells


def lines_of(code: str) -> Iterator[list[str]]:
    """The commands of a block, split, without what is set for them."""
    for line in logical_lines(code):
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


def logical_lines(code: str) -> list[str]:
    """The lines without comments; one ends where no quote is open and no backslash stands."""
    lines: list[str] = []
    for line in re.sub(r"\s+# .*", "", code.replace("\\\n", " ")).splitlines():
        if lines and lines[-1].count("'") % 2:
            lines[-1] += f"\n{line}"
        else:
            lines.append(line)
    return lines


def stand_ins(words: list[str], folder: Path) -> list[str]:
    """What a reader puts where a page has capitals; fewer requests, and smaller tiers."""
    places: Mapping[str, str] = {
        **dict.fromkeys(("MODEL", "MODEL_DIR", "DIR"), "model"),
        "URL": f"disk:{folder}/kv",
    }
    chosen = [places.get(word, word) for word in words]
    if words[0] == "simulate":
        if "--state-size" in chosen:
            chosen = [re.sub("MiB", "KiB", word) for word in chosen]
        chosen = [re.sub("[GT]iB", "MiB", word) for word in chosen]
    for index, word in enumerate(chosen[:-1]):
        if word == "--requests":
            chosen[index + 1] = "100"
    return chosen


def run_kvconnect(words: list[str], block: Block) -> None:
    parsed = make_parser(words[0]).parse_args(words)
    ranks = getattr(parsed, "tensor_parallel_size", None) or 1
    if words[0] in PARSED or ranks > 1:
        return
    # Where nothing was to be deleted, these say so.
    fine = (0, 3) if words[0] in {"prune", "drop"} else (0,)
    assert main(words) in fine, (block.page, words)


@pytest.mark.parametrize("block", written_in(*SHELLS))
def test_a_block_for_shells_runs(block: Block, folder: Path):
    filled = "disk:cache" if "disk:cache" in block.code else f"disk:{folder}/kv"
    reads = any(word in block.code for word in ("URL", "copy disk", "disk:cache"))
    if reads and "make-model model" not in block.code:
        assert main(["generate", "model", "--prompt", "x" * 40, "--store", filled]) == 0
    for file in re.findall(r"[\w./]+/[\w./]+\.py\b", block.code):
        assert (ROOT / file).is_file(), file
    for words in lines_of(here(block.code, folder)):
        if words[0] == "kvconnect":
            run_kvconnect(stand_ins(words[1:], folder), block)
        elif words[:2] == ["python", "-c"]:
            (folder / "line.py").write_text(words[2], encoding="utf-8")
            runpy.run_path("line.py", run_name="__main__")
        elif words[:2] == ["pip", "install"]:
            installs_what_is_here(words[2:])
        elif words[0] == "." and words[1].endswith("/bin/activate"):
            continue
        elif words[0] == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
        else:
            program = words[0].removeprefix(".venv/bin/")
            assert program in (*FOREIGN, "python", "pytest", "for"), words


def installs_what_is_here(wanted: list[str]) -> None:
    """Fails if anything but the checkout, with extras that exist, is asked of an index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for one in wanted:
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", one)
        assert found is not None, one
        extras = set((found[1] or "").split(",")) - {""}
        assert extras <= set(project["optional-dependencies"]), one


# ------------------------------------------------------------------------------------- all


def test_there_are_no_other_blocks():
    assert {one.language for one in all_blocks()} <= {"python", *SHELLS, *SHOWN}


def test_every_page_says_how_to_have_the_command():
    without = []
    for page in {one.page for one in all_blocks() if one.language in SHELLS}:
        text = page.read_text(encoding="utf-8")
        before = text.partition("\nkvconnect ")[0]
        if before != text and "pip install " not in before and ".venv/bin/activate" not in before:
            without.append(page.name)
    assert without == []
