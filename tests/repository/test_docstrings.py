"""Docstrings and comments are sentences that stand alone, in the words of the field.

A docstring begins with a verb in the third person, or with a noun and its article. No paragraph
and no comment begins with a subordinate clause, and none of them has a private image.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PRODUCT = ("kvconnect", "backends", "kernels")

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

SUBORDINATE = frozenset(("what", "whatever", "whether", "nothing", "as", "of", "see"))
"""First words of a paragraph or a comment that leave its subject open."""

IMAGES = re.compile(
    r"(?i)\b(?:"
    r"tells?|told|lets? go|letting go|hand(?:s|ed|ing)? (?:out|over)|patience|foretell\w*|grips?"
    r"|(?:take|takes|taken|took|taking) up(?! to)|put(?:s|ting)? in place|hopes?|hoped|in vain"
    r"|look(?:s|ed|ing)? at|(?:come|comes|came) to|(?:give|gives|given|gave|giving) up|sees? to"
    r"|(?:go|goes|went|going|gone) on|of (?:no|some|any) use|all the same|what stands around"
    r"|whoever|nobody|somebody|anybody|everybody|hears?|heard|asked for"
    r")\b"
)
"""Private images, and verbs that the field has other words for: send, report, wait, read, free."""

MARKS = re.compile(r"``.*?``|`[^`]*`|\w+(?:, \w+)*:")
"""Code, and the names before the descriptions of arguments and attributes."""

ARTICLES = frozenset(("A", "An", "The", "Each", "Every"))


def is_well_begun(docstring: str) -> bool:
    """Returns whether the first word is an article, or ends like a verb in the third person."""
    words = re.match(r"[\w-]*", docstring)
    word = "" if words is None else words[0]
    if word in FORBIDDEN or docstring.startswith("The same"):
        return False
    return word in ARTICLES or re.fullmatch(r"[A-Z][\w-]+s", word) is not None


def starts_alone(text: str) -> bool:
    """Returns whether the first word of `text` leaves no subject open."""
    words = text.split(maxsplit=1)
    return not words or words[0].strip(",.:;").lower() not in SUBORDINATE


def image_in(text: str) -> str:
    """Returns the first private image in `text`, outside of code; empty: there is none."""
    found = IMAGES.search(MARKS.sub("", " ".join(text.split())))
    return "" if found is None else found[0]


@cache
def _strings(file: Path) -> tuple[list[str], list[str]]:
    """Returns the docstrings, and the paragraphs of these and of the strings below attributes."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings: list[str] = []
    paragraphs: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            docstrings.append(text)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                paragraphs += re.split(r"\n\s*\n", text.strip())
    return docstrings, paragraphs


def _comments(source: str) -> Iterator[str]:
    """Yields the comments; those on lines of their own that follow each other are one."""
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if lines and not (alone and token.start[0] == last + 1):
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        last = token.start[0] if alone else -1
    if lines:
        yield " ".join(lines)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_a_room_begin_with_a_verb_or_an_article(repository: Path, room: str):
    texts = [text for file in repository.glob(room) for text in _strings(file)[0]]
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


@pytest.mark.parametrize("folder", PRODUCT)
def test_paragraphs_and_comments_stand_alone_and_have_no_private_images(
    repository: Path, folder: str
):
    wrong = []
    for file in sorted((repository / folder).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        wrong += [
            f"{file.relative_to(repository)}: {' '.join(text.split())[:80]}"
            for text in (*_strings(file)[1], *_comments(source))
            if not starts_alone(text) or image_in(text)
        ]
    assert not wrong


@pytest.mark.parametrize("text", ["What it holds.", "of the pool", "See `Backend`.", "As before."])
def test_such_a_first_word_is_found(text: str):
    assert not starts_alone(text)


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("Readers are told of it.", "told"),
        ("Blocks are handed\n    out.", "handed out"),
        ("Lets go of them.", "Lets go"),
        ("tells: reports the end.", ""),
        ("`tell` sends it to ``whoever``.", ""),
        ("Shells and gospel tellers.", ""),
    ],
)
def test_such_an_image_is_found_outside_of_code(text: str, image: str):
    assert image_in(text).lower() == image.lower()


def test_comments_on_lines_of_their_own_that_follow_each_other_are_one():
    source = "x = 1  # first\n# second\n# third\n\n# fourth\n"
    assert list(_comments(source)) == ["first", "second third", "fourth"]
