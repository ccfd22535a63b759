"""The labels that distinguish the metrics of one store of this process from another's."""

from __future__ import annotations

import threading
from itertools import count

from kvconnect.backends.url import StoreUrl
from kvconnect.redaction import HIDDEN
from kvconnect.trace import Labels

# The most addresses that labels distinguish. Counters live as long as the process, which may open
# stores at many addresses.
_MOST_PLACES = 256
_ELSEWHERE = "elsewhere"


def place_of(url: StoreUrl) -> str:
    """Returns the store's address without credentials and parameters: ``disk:///var/cache/kv``."""
    shown = str(url)
    if shown == f"{url.scheme}:{HIDDEN}":  # a part of its parameters may be a part of its password
        return shown
    return str(StoreUrl(url.scheme, url.location.rpartition("@")[2], url.path))


class StoreLabels:
    """The labels ``store`` (its class) and ``place``, of one store at a time. Thread-safe.

    If stores of one class in one place are open at the same time, the second one's place ends
    in `` (2)``, and so on. A store that opens where another one was closed continues the counters
    of that store.
    """

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._taken: set[Labels] = set()
        # The garbage collector frees the labels of a store that was never closed, perhaps on a
        # thread that is just taking labels.
        self._lock = threading.RLock()

    def take(self, store: str, place: str) -> Labels:
        """Returns labels that no other store has until `give_back`."""
        with self._lock:
            if place not in self._places and len(self._places) >= _MOST_PLACES:
                place = _ELSEWHERE
            self._places.add(place)
            for number in count(1):
                shown = place if number == 1 else f"{place} ({number})".lstrip()
                labels: Labels = (("store", store), ("place", shown))
                if labels not in self._taken:
                    break
            self._taken.add(labels)
            return labels

    def give_back(self, labels: Labels) -> None:
        """Frees the labels of a closed store; a second call does nothing."""
        with self._lock:
            self._taken.discard(labels)


store_labels = StoreLabels()
"""The labels of the whole process."""
