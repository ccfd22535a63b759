"""Reasons against caching: each is counted under its code, and logged once."""

from __future__ import annotations

import logging
import re

from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.trace import metrics


def counted(doubt):
    return metrics.by_labels().get((("reason", doubt.value),), {}).get("engine.request.uncached", 0)


def test_a_doubt_is_counted_each_time_and_logged_once_for_each_detail(caplog):
    before = counted(Doubt.MASK)
    with caplog.at_level(logging.WARNING, "kvconnect"):
        sentences = [note_doubt(Doubt.MASK, detail) for detail in ("one", "one", "two")]
    assert sentences == [f"{Doubt.MASK.sentence}: {detail}" for detail in ("one", "one", "two")]
    assert counted(Doubt.MASK) == before + 3
    logged = [record.message for record in caplog.records]
    assert logged == [f"not cached: {sentence}" for sentence in sentences[1:]]


def test_codes_are_labels_and_sentences_differ_and_have_no_stop():
    for doubt in Doubt:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", doubt.value)
        assert doubt.sentence.strip(" .") == doubt.sentence
        assert Doubt(doubt.value) is doubt
    assert len({doubt.sentence for doubt in Doubt}) == len(Doubt)
