"""The lines of the log: as text for people, or as JSON for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from kvconnect.redaction import text_without_passwords

__all__ = ["JsonLines", "TextLines"]


class TextLines(logging.Formatter):
    """Formats a record as ``kvconnect: WARNING: …``."""

    def __init__(self) -> None:
        super().__init__("kvconnect: %(levelname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line; passwords in lines of other packages are hidden."""
        return _hidden(record, super().format(record))


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on a line.

    Its keys are ``time`` (UTC), ``level``, ``logger`` and ``message``, ``traceback`` of an error,
    and those of the record's ``fields``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object; passwords are hidden as by `TextLines`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _hidden(record, record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = _hidden(record, self.formatException(record.exc_info))
        return json.dumps(line | getattr(record, "fields", {}))


def _hidden(record: logging.LogRecord, text: str) -> str:
    # Records of kvconnect contain no passwords.
    return text if record.name.partition(".")[0] == "kvconnect" else text_without_passwords(text)
