"""Docstrings begin with a verb in the third person, or with a noun and its article."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = (
    *("kvconnect/*.py", "kvconnect/cache/**/*.py", "kvconnect/cli/**/*.py"),
    *("kvconnect/digest/**/*.py", "kvconnect/engine/**/*.py", "kvconnect/prometheus/**/*.py"),
    *("kvconnect/server/**/*.py", "kvconnect/simulate/**/*.py", "kvconnect/testing/**/*.py"),
    "kernels/**/*.py",
    "backends/**/*.py",
    "kvconnect/connector/**/*.py",
    *("kvconnect/transfer/**/*.py", "kvconnect/integrations/**/*.py"),
    *("kvconnect/bench/**/*.py", "tests/benchmarks/**/*.py"),
    "kvconnect/operations/**/*.py",
)
"""All rooms. Examples show theirs as the text of ``--help``."""

FORBIDDEN = frozenset(
    (
        *("What", "Whatever", "Whether", "Which", "Who", "Whom", "Whose", "Where", "When", "Why"),
        *("How", "If", "As", "Of", "From", "To", "In", "On", "At", "By", "With", "Without"),
        *("Within", "While", "Until", "After", "Before", "Nothing", "None", "No", "Not", "All"),
        *("Everything", "Anything", "Something", "Those", "These", "This", "That", "There", "It"),
        *("Its", "One", "Once", "So", "See", "Has", "Is", "Us", "Subclass"),
    )
)
"""First words of a clause that cannot stand alone, and of a pronoun without a noun."""

ARTICLES = frozenset(("A", "An", "The", "Each", "Every"))


def is_well_begun(docstring: str) -> bool:
    """Returns whether the first word is an article, or ends like a verb in the third person."""
    words = re.match(r"[\w-]*", docstring)
    word = "" if words is None else words[0]
    if word in FORBIDDEN or docstring.startswith("The same"):
        return False
    return word in ARTICLES or re.fullmatch(r"[A-Z][\w-]+s", word) is not None


def _docstrings(file: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_a_room_begin_with_a_verb_or_an_article(repository: Path, room: str):
    texts = [text for file in repository.glob(room) for text in _docstrings(file)]
    assert texts
    wrong = Counter(" ".join(text.split()[:6]) for text in texts if not is_well_begun(text))
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        *("What a block holds.", "Whether it fits.", "Nothing, if it fits.", "See `Backend`."),
        *("As `load`.", "Of the pool.", "The same bytes.", "Return it.", "`count` blocks.", ""),
        *("Publish the blocks.", "Let go of them.", "Until it ends.", "It is over."),
    ],
)
def test_such_a_docstring_is_found(text: str):
    assert not is_well_begun(text)


@pytest.mark.parametrize(
    "text", ["Returns it.", "A block.", "The blocks of a pool.", "Page-locks it.", "Does nothing."]
)
def test_such_a_docstring_is_not(text: str):
    assert is_well_begun(text)
