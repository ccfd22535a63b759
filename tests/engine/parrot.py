"""A drafter for tests: knows the answers, and is wrong on demand."""

from __future__ import annotations

import numpy as np

from kvconnect.engine.sampling.drafts import NgramSpeculation

EAGER = NgramSpeculation(num_draft_tokens=5, max_ngram_size=3, min_ngram_size=1)


class Parrot:
    """A drafter that knows the answers, and now and then is wrong, or silent for a while."""

    def __init__(self, answers, wrong_every: int = 0, count: int = 5, pause: int = 0) -> None:
        self.answers, self.wrong_every, self.count, self.pause = answers, wrong_every, count, pause
        self.asked = 0

    def propose(self, tokens, limit):
        known = tokens.tolist()
        self.asked += 1
        if self.asked % 40 < self.pause:
            return np.empty(0, np.int32)
        for answer in self.answers:
            if answer[: len(known)] == known:
                drafts = answer[len(known) : len(known) + min(self.count, limit)]
                if self.wrong_every:
                    drafts = [
                        (token + (not (len(known) + i) % self.wrong_every)) % 256
                        for i, token in enumerate(drafts)
                    ]
                return np.array(drafts, np.int32)
        return np.empty(0, np.int32)


def draft_with(llm, drafter):
    llm._engine._scheduler._drafter = drafter
