"""The requests that the S3 store makes, each blocking, for threads."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from kvconnect.backends.s3_client import make_client
from kvconnect.backends.s3_errors import S3Failure, failures, failures_at_open
from kvconnect.backends.s3_settings import S3Settings
from kvconnect.backends.s3_transport import Transport
from kvconnect.backends.s3_upload import Upload
from kvconnect.errors import BackendUnavailable

__all__ = ["Conflict", "Fetched", "Gone", "Listed", "S3Bucket"]

# boto3 tries again what fails before the body; this is for bodies that break off.
_BODY_ATTEMPTS = 3
_BODY_ERRORS = (
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Gone(Exception):
    """The object that was to be read is not there."""


class Conflict(Exception):
    """The object that was to be written is there already, or is not what it was."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The beginning of an object.

    Attributes:
        data: its first bytes.
        etag: of the object; another one once it is written anew.
        nbytes: of the whole object.
        age_s: since it was written, by the server's clock alone.
    """

    data: bytes
    etag: str
    nbytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it."""

    name: str
    nbytes: int
    modified_at: float


class S3Bucket:
    """One bucket of a service, through boto3. Thread-safe; every method blocks.

    Args:
        settings: where it is.

    Raises:
        ConfigurationError: the profile, region or certificates are not there.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._bucket = settings.bucket
        writing = {
            "StorageClass": settings.storage_class,
            "ServerSideEncryption": settings.sse,
            "SSEKMSKeyId": settings.sse_kms_key_id,
        }
        self._writing = {name: value for name, value in writing.items() if value}
        self._has_conditions = True
        self.transport: Transport | None
        with failures_at_open(settings):
            self._client, self.transport = make_client(settings)

    def close(self) -> None:
        """End requests in flight with an error, and close all connections."""
        if self.transport is not None:
            self.transport.abort()
        self._client.close()

    def end_overdue(self) -> None:
        """End requests that take far longer than their size explains."""
        if self.transport is not None:
            self.transport.end_overdue()

    def check(self) -> None:
        """See that the bucket is there and may be read.

        Raises:
            ConfigurationError: no such bucket, no credentials, or they are refused.
            BackendUnavailable: nobody answers, or with an error of its own.
        """
        with failures_at_open(self._settings):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if S3Failure.of(error).status >= 500:
                    raise
                # An answer to HEAD has no body that says why; and one who may only read objects
                # is refused it, too.
                self._check_object()

    def _check_object(self) -> None:
        try:
            name = self._settings.name("k", "absent")
            self._client.get_object(Bucket=self._bucket, Key=name)["Body"].close()
        except ClientError as error:
            if not S3Failure.of(error).absent:
                raise

    def fetch(self, name: str, limit: int) -> Fetched | None:
        """The first `limit` bytes of an object, or all it has; ``None``: there is no such object.

        Raises:
            BackendUnavailable: it is not known whether there is.
        """
        for attempt in range(_BODY_ATTEMPTS):
            with failures(self._settings, "reading"):
                try:
                    return self._fetch(name, limit)
                except ClientError as error:
                    failure = S3Failure.of(error)
                    if failure.absent:
                        return None
                    if failure.status == 416:  # an empty object has no first byte
                        return self._fetch_empty(name)
                    raise
                except _BODY_ERRORS:
                    if attempt + 1 == _BODY_ATTEMPTS:
                        raise
        raise self._broken(name)

    def _fetch(self, name: str, limit: int) -> Fetched:
        response = self._client.get_object(
            Bucket=self._bucket, Key=name, Range=f"bytes=0-{limit - 1}"
        )
        with closing(response["Body"]) as body:
            span = self._span(response)
            if span[0] != 0 or span[1] >= limit:
                raise self._wrong_range(response)
            data = body.read()
        if len(data) != span[1] + 1:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=span[1] + 1)
        return Fetched(data, response["ETag"], span[2], _age(response))

    def _fetch_empty(self, name: str) -> Fetched | None:
        try:
            response = self._client.head_object(Bucket=self._bucket, Key=name)
        except ClientError as error:
            if S3Failure.of(error).absent:
                return None
            raise
        return Fetched(b"", response["ETag"], response["ContentLength"], _age(response))

    def read(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, with the bytes of an object from `start` on.

        Raises:
            Gone: there is no such object, or it ends before `start`.
            BackendUnavailable: `views` are undefined.
        """
        for attempt in range(_BODY_ATTEMPTS):
            with failures(self._settings, "reading"):
                try:
                    self._read(name, start, views)
                    return
                except ClientError as error:
                    failure = S3Failure.of(error)
                    if failure.absent or failure.status == 416:
                        raise Gone(name) from error
                    raise
                except _BODY_ERRORS:
                    if attempt + 1 == _BODY_ATTEMPTS:
                        raise

    def _read(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        end = start + sum(view.nbytes for view in views)
        response = self._client.get_object(
            Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end - 1}"
        )
        with closing(response["Body"]) as body:
            span = self._span(response)
            if span[0] == start and span[1] + 1 < end and span[1] + 1 == span[2]:
                raise Gone(f"{name} has {span[2]} bytes")
            if span[0] != start or span[1] + 1 != end:
                raise self._wrong_range(response)
            for view in views:
                filled = 0
                while filled < view.nbytes:
                    size = body.readinto(view[filled:])
                    if not size:
                        raise IncompleteReadError(actual_bytes=filled, expected_bytes=view.nbytes)
                    filled += size

    def put(
        self, name: str, views: Sequence[memoryview | bytes], *, replaces: str | None = ""
    ) -> str:
        """Write an object of all `views`, whole or not at all; return its etag.

        Args:
            name: of the object.
            views: its bytes.
            replaces: etag of the object that is there; empty: none is there; ``None``: whatever is.

        Raises:
            Conflict: something else is there.
            BackendUnavailable: it may have been written, or not.
        """
        condition = {}
        if replaces is not None and self._has_conditions:
            condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        with failures(self._settings, "writing"):
            try:
                response = self._client.put_object(
                    Bucket=self._bucket,
                    Key=name,
                    Body=Upload(views),
                    **condition,
                    **self._writing,
                )
                if "ETag" not in response:
                    raise BackendUnavailable(f"{self._settings}: writing {name}: no receipt")
                return str(response["ETag"])
            except ClientError as error:
                failure = S3Failure.of(error)
                # 409: another writer of this object was faster, or it was deleted meanwhile.
                absent = bool(replaces) and failure.absent
                if failure.conflict or failure.status == 409 or absent:
                    raise Conflict(name) from error
                if not condition or failure.status != 501:
                    raise
        # A service without conditional writes: the last writer wins, of equal content.
        self._has_conditions = False
        return self.put(name, views, replaces=None)

    def remove(self, name: str) -> None:
        """Delete an object; none is no error."""
        with failures(self._settings, "deleting"):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def pages(self, prefix: str) -> Iterator[list[Listed]]:
        """All objects whose name begins with `prefix`, up to 1,000 at a time."""
        pages = iter(
            self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
        )
        while True:
            with failures(self._settings, "listing"):
                page = next(pages, None)
            if page is None:
                return
            yield [
                Listed(found["Key"], int(found["Size"]), found["LastModified"].timestamp())
                for found in page.get("Contents", ())
            ]

    def _span(self, response: dict[str, Any]) -> tuple[int, int, int]:
        """First and last byte of a response, and length of the whole object."""
        status = response["ResponseMetadata"]["HTTPStatusCode"]
        match = _CONTENT_RANGE.fullmatch(response.get("ContentRange", ""))
        if status != 206 or match is None or "ETag" not in response:
            raise self._wrong_range(response)
        first, last, total = map(int, match.groups())
        if response.get("ContentLength") != last - first + 1:
            raise self._wrong_range(response)
        return first, last, total

    def _wrong_range(self, response: dict[str, Any]) -> BackendUnavailable:
        status = response["ResponseMetadata"]["HTTPStatusCode"]
        found = response.get("ContentRange", "none")
        return BackendUnavailable(
            f"{self._settings}: asked for a range, the service answered {status} with range "
            f"'{found}' of {response.get('ContentLength')} bytes"
        )

    def _broken(self, name: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._settings}: reading {name}: its body breaks off")


def _age(response: dict[str, Any]) -> float:
    try:
        sent_at = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
        now = sent_at.timestamp()
    except (KeyError, ValueError):
        now = time.time()
    modified = response.get("LastModified")
    return 0.0 if modified is None else max(0.0, now - modified.timestamp())
