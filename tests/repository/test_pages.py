"""The pages in docs name what is there: files, classes, parameters, checks and reasons."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from kvconnect import SamplingParams, errors
from kvconnect.backends import StoreUrl, open_backend
from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError
from kvconnect.testing.checks import all_checks

Page = Callable[[str], str]


@pytest.fixture(scope="module")
def page(repository: Path) -> Page:
    """Returns the text of a page by its name, in whatever folder of docs it is."""

    def read(name: str) -> str:
        (file,) = (repository / "docs").rglob(f"{name}.md")
        return file.read_text(encoding="utf-8")

    return read


def test_readme_begins_with_making_a_model_and_names_targets_of_make(repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^kvconnect ([^#\n]*\w)", readme, re.MULTILINE)
    assert first == "make-model model"
    assert len(others) >= 2
    targets = set(re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"`?make ([a-z][\w-]*)`?", readme)) <= targets


# ---------------------------------------------------------------------------------- architecture


def test_every_file_that_the_architecture_names_is_there(repository: Path, page: Page):
    named = set(
        re.findall(r"`((?:kvconnect|backends|kernels|docs|tests)/[\w./*]+)`", page("architecture"))
    )
    assert len(named) > 30
    assert not [name for name in named if not list(repository.glob(name))]


def _areas(page: Page) -> list[tuple[str, str]]:
    """Returns heading and text of each area of the page, the part before them with no heading."""
    section = page("architecture").partition("\n## Where to change what\n")[2]
    first, *areas = re.split(r"^### ", section, flags=re.MULTILINE)
    cut = [one.partition("\n") for one in areas]
    return [("", first), *((heading, body) for heading, _, body in cut)]


def test_the_architecture_has_few_areas(page: Page):
    assert 10 < len(_areas(page)[1:]) <= 25


def test_every_file_of_an_area_is_in_its_folder(repository: Path, page: Page):
    """A name begins in the folder of the heading, or in one under it, or at the top."""
    name = r"`((?:[\w.*-]+/)*[\w.*-]+(?:/|\.(?:py|md|html|toml|yaml|txt)))`"
    missing, seen = [], 0
    for heading, body in _areas(page):
        folders = re.findall(r"`([\w/]+/)`", heading) or ["kvconnect", "backends", "kernels"]
        for named in set(re.findall(name, body)):
            seen += 1
            there = any(any((repository / one).glob(f"**/{named}")) for one in folders)
            if not (there or any(repository.glob(named))):
                missing.append((heading, named))
    assert seen > 300
    assert missing == []


def test_every_name_of_an_area_is_in_its_file(repository: Path, page: Page):
    pairs = [
        (folder, name.rpartition(".")[2], file)
        for heading, body in _areas(page)
        for folder in re.findall(r"`([\w/]+/)`", heading)
        for name, file in re.findall(r"`([\w.]+)` (?:in|of)\s+`([\w/]+\.py)`", body)
    ]
    assert len(pairs) > 15
    for folder, name, file in pairs:
        found = (repository / folder / file, repository / file)
        texts = [one.read_text(encoding="utf-8") for one in found if one.is_file()]
        assert any(re.search(rf"\b{name}\b", text) for text in texts), (name, file)


def test_every_method_that_the_architecture_names_is_there(repository: Path, page: Page):
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("kvconnect", "backends", "kernels")
        for path in (repository / folder).rglob("*.py")
    )
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page("architecture")))
    assert len(named) > 10
    for cls, method in named:
        body = re.search(rf"^class {cls}\b.*?(?=^class |\Z)", text, re.MULTILINE | re.DOTALL)
        assert body is not None, cls
        assert re.search(rf"^    (async )?def {method}\b", body[0], re.MULTILINE), (cls, method)


# ---------------------------------------------------------------------------------- tables


def test_the_table_of_sampling_has_every_parameter_and_its_default(page: Page):
    section = page("generate").partition("\n## Sampling\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| \**`?([\w.-]+)", section, re.MULTILINE)
    defaults = {name: field.default for name, field in SamplingParams.model_fields.items()}
    assert [name for name, _ in rows] == [name for name, _ in rows if name in defaults]
    assert {name for name, _ in rows} == set(defaults)
    for name, shown in rows:
        default = defaults[name]
        assert shown == ("none" if default == () else f"{default}".removesuffix(".0"))


def test_every_reason_against_caching_is_on_the_page_in_its_words(page: Page):
    section = page("identity").partition("## What is not cached, and why")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| `(?!reason`)", line)]
    expected = [f"| `{doubt.value}` | {doubt.sentence} |" for doubt in Doubt]
    assert rows == expected, "the table should be:\n" + "\n".join(expected)


def test_the_page_about_identity_is_short_and_pages_that_speak_of_keys_lead_there(page: Page):
    assert len(page("identity").splitlines()) <= 150
    for name in ("architecture", "engines", "stores"):
        assert "(why/identity.md)" in page(name), name


def test_every_attack_is_on_the_page_with_its_tries(repository: Path, page: Page):
    rows = re.findall(
        r"^\| .* \| ([\d,]+) tries.* \| `(tests/\S+)` \|$", page("reliability"), re.MULTILINE
    )
    told = {file: tries for tries, file in rows}
    there = sorted((repository / "tests/hostile").glob("test_*.py"))
    assert told.keys() == {file.relative_to(repository).as_posix() for file in there}
    for file in there:
        (tries,) = re.findall(r'param\((\d+), id="long"', file.read_text(encoding="utf-8"))
        assert told[file.relative_to(repository).as_posix()] == f"{int(tries):,}"


# ---------------------------------------------------------------------------------- stores


def test_what_covers_the_faults_seen_elsewhere_exists(repository: Path, page: Page):
    _, _, table = page("stores").partition("| seen elsewhere | covered by |\n")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    scorecard = {fault: re.findall(r"`([^`]+)`", covered) for fault, covered in rows}
    assert len(scorecard) == 14
    assert all(scorecard.values())
    checks = {one.id for one in all_checks()}
    for name in (name for covered in scorecard.values() for name in covered):
        file, is_test, test = name.partition("::")
        if not is_test:
            assert name in checks
        else:
            source = (repository / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), name


@pytest.mark.parametrize(
    "urls",
    [
        ("memory:",),
        ("disk:/kv",),
        ("redis://h", "redis+unix:///s", "redis+sentinel://h/s", "redis+cluster://h"),
        ("s3://bucket",),
        ("nixl:",),
        ("tiered:",),
    ],
)
def test_the_parameters_are_those_that_the_store_takes(page: Page, urls: tuple[str, ...]):
    documented = {}
    for section in re.split(r"^## ", page("stores"), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        first = re.match(r"`(\w+):", heading)
        if first is not None:
            cells = re.findall(r"^\| (`.+?) \| ", body, re.MULTILINE)
            names = re.findall(r"`(\w+)`", " ".join(cells)) + re.findall(r"\?(\w+)=", heading)
            documented[first[1]] = set(names)
    taken = set()
    for url in urls:
        with pytest.raises(ConfigurationError) as caught:
            open_backend(f"{url}?qqqqqqqq=1")
        taken |= set(str(caught.value).partition("valid are ")[2].split(", "))
    of_every_store = {"codec", "key_file"}
    assert documented[StoreUrl.parse(urls[0]).scheme] == taken - of_every_store


# ---------------------------------------------------------------------------------- generated


@pytest.mark.parametrize("name", ["settings.md", "errors.md"])
def test_the_tables_of_the_reference_are_those_of_the_code(repository: Path, name: str):
    script = runpy.run_path(str(repository / "docs/reference/tables.py"))
    written = (repository / "docs/reference" / name).read_text(encoding="utf-8")
    assert written == script["PAGES"][name](), "python docs/reference/tables.py writes it"


def test_every_field_and_every_error_is_in_the_tables(repository: Path):
    script = runpy.run_path(str(repository / "docs/reference/tables.py"))
    for cls in script["CLASSES"]:
        assert script["fields"](cls).keys() == cls.model_fields.keys(), cls
    listed = set(re.findall(r"^(?:## |\| `)(\w+)", script["errors_page"](), re.MULTILINE))
    assert listed == set(errors.__all__) - {"KvConnectError", "nearest"}


@pytest.mark.parametrize("name", ["block", "restart", "crossover"])
def test_the_pictures_are_drawn_from_their_data(repository: Path, name: str):
    script = runpy.run_path(str(repository / "docs/pictures/draw.py"))
    drawn = (repository / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    assert drawn == script["draw"](name), "python docs/pictures/draw.py draws it"


def test_the_plot_shows_figures_of_the_page(repository: Path, page: Page):
    data = json.loads((repository / "docs/pictures/restart.json").read_text(encoding="utf-8"))
    figures = {
        float(one) for one in re.findall(r"\d+(?:\.\d+)?", page("benchmarks").replace(",", ""))
    }
    for run in data["runs"]:
        shown = [run["computed_ms"], run["restored_ms"], *(run["floor_ms"] or ())]
        assert set(shown) <= figures
