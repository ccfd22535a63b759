"""docs/stores.md lists the parameters of every store, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvconnect.backends import StoreUrl, open_backend
from kvconnect.errors import ConfigurationError

OF_EVERY_STORE = {"codec", "key_file"}


@pytest.fixture(scope="module")
def documented(repository: Path) -> dict[str, set[str]]:
    """The parameters under each heading, by the first scheme in it."""
    text = (repository / "docs/stores.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        first = re.match(r"`(\w+):", heading)
        if first is not None:
            cells = re.findall(r"^\| (`.+?) \| ", body, re.MULTILINE)
            names = re.findall(r"`(\w+)`", " ".join(cells)) + re.findall(r"\?(\w+)=", heading)
            found[first[1]] = set(names)
    return found


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
def test_the_parameters_are_those_that_the_store_takes(
    documented: dict[str, set[str]], urls: tuple[str, ...]
) -> None:
    taken = set()
    for url in urls:
        with pytest.raises(ConfigurationError) as caught:
            open_backend(f"{url}?qqqqqqqq=1")
        taken |= set(str(caught.value).partition("valid are ")[2].split(", "))
    assert documented[StoreUrl.parse(urls[0]).scheme] == taken - OF_EVERY_STORE
