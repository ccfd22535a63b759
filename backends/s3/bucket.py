"""The requests that the S3 store makes, each blocking, for threads."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, IncompleteReadError
from botocore.response import StreamingBody

from kvconnect.backends.s3.client import S3Client
from kvconnect.backends.s3.errors import S3Failure, failures, failures_at_open
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.transport import fill
from kvconnect.errors import BackendUnavailable

# The most pages of a listing in a row that are empty or repeat the one before.
_MOST_BARREN_PAGES = 1000
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Gone(Exception):
    """The error that the object to read does not exist."""


class Conflict(Exception):
    """The error that the object to write exists already, or has changed."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The beginning of an object.

    Attributes:
        data: its first bytes.
        etag: the etag of the object, which changes with every write.
        nbytes: the bytes of the whole object.
        age_s: seconds since it was written, by the server's clock.
    """

    data: bytes
    etag: str
    nbytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing."""

    name: str
    nbytes: int
    modified_at: float


class S3Bucket:
    """The objects of one bucket. Thread-safe; every method blocks.

    Attributes:
        settings: the store's settings.

    Raises:
        ConfigurationError: the profile, region or certificates do not exist.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self._writing = {
            name: value
            for name, value in (
                ("x-amz-storage-class", settings.storage_class),
                ("x-amz-server-side-encryption", settings.sse),
                ("x-amz-server-side-encryption-aws-kms-key-id", settings.sse_kms_key_id),
            )
            if value
        }
        self._has_conditions = True
        with failures_at_open(settings):
            self.client = S3Client(settings)

    def close(self) -> None:
        """Ends requests in flight with an error, and closes all connections."""
        self.client.close()

    def end_overdue(self) -> None:
        """Ends requests that take far longer than their size justifies."""
        if self.client.transport is not None:
            self.client.transport.connections.end_overdue()

    def check(self) -> None:
        """Checks that the bucket exists and may be read; call it before any other request.

        Raises:
            ConfigurationError: no such bucket, no credentials, or they are refused.
            BackendUnavailable: the service cannot be reached, or fails.
        """
        with failures_at_open(self.settings):
            self.client.look(self.settings.bucket, self.settings.name("k", "absent"))

    def fetch(self, name: str, limit: int) -> Fetched | None:
        """Returns the first `limit` bytes of an object, or all of it; ``None`` if there is none.

        Raises:
            BackendUnavailable: it is not known whether the object exists.
        """

        def take(response: AWSResponse) -> Fetched:
            first, last, total = self._span(response)
            if first != 0 or last >= limit:
                raise self._wrong_range(response)
            data = _body(response).read(last + 1)
            if len(data) != last + 1:
                raise IncompleteReadError(actual_bytes=len(data), expected_bytes=last + 1)
            return Fetched(data, response.headers["etag"], total, _age(response.headers))

        with failures(self.settings, "reading"):
            try:
                return self.client.ask("GET", name, take, headers={"Range": f"bytes=0-{limit - 1}"})
            except ClientError as error:
                failure = S3Failure.of(error)
                if failure.status == 416:  # an empty object has no first byte
                    return self._fetch_empty(name)
                if failure.absent:
                    return None
                raise

    def _fetch_empty(self, name: str) -> Fetched | None:
        def take(response: AWSResponse) -> Fetched:
            headers = response.headers
            return Fetched(b"", headers["etag"], int(headers["content-length"]), _age(headers))

        try:
            return self.client.ask("HEAD", name, take)
        except ClientError as error:
            if S3Failure.of(error).status == 404:  # without a body that contains the reason
                return None
            raise

    def read(
        self, name: str, start: int, views: Sequence[memoryview], etag: str | None = None
    ) -> None:
        """Fills `views`, one after the other, with the bytes of an object from `start` on.

        Args:
            name: the name of the object.
            start: the offset of the first byte.
            views: receive the bytes.
            etag: the etag that the object must have; ``None``: any.

        Raises:
            Gone: the object does not exist, was replaced, or ends before `start`.
            BackendUnavailable: `views` are undefined.
        """
        end = start + sum(view.nbytes for view in views)

        def take(response: AWSResponse) -> None:
            first, last, total = self._span(response)
            if etag is not None and _opaque(response.headers["etag"]) != _opaque(etag):
                raise Gone(f"{name} was replaced")
            if first == start and last + 1 < end and last + 1 == total:
                raise Gone(f"{name} has {total} bytes")
            if first != start or last + 1 != end:
                raise self._wrong_range(response)
            filled = fill(_body(response), views)
            if filled != end - start:
                raise IncompleteReadError(actual_bytes=filled, expected_bytes=end - start)

        with failures(self.settings, "reading"):
            try:
                self.client.ask("GET", name, take, headers={"Range": f"bytes={start}-{end - 1}"})
            except ClientError as error:
                failure = S3Failure.of(error)
                if failure.absent or failure.status == 416:
                    raise Gone(name) from error
                raise

    def put(
        self, name: str, views: Sequence[memoryview | bytes], *, replaces: str | None = ""
    ) -> str:
        """Writes an object of all `views`, whole or not at all; returns its etag.

        Args:
            name: the name of the object.
            views: its bytes.
            replaces: the etag of the object to replace; empty: the object must not exist; ``None``:
                any.

        Raises:
            Conflict: another object has the name.
            BackendUnavailable: the request failed; the object may have been written.
        """
        condition = {}
        if replaces is not None and self._has_conditions:
            condition = {"If-Match": replaces} if replaces else {"If-None-Match": "*"}
        headers = {**condition, **self._writing}
        with failures(self.settings, "writing"):
            try:
                etag = self.client.ask("PUT", name, _receipt, headers=headers, views=views)
            except ClientError as error:
                failure = S3Failure.of(error)
                # 409: another writer of this object was faster, or it was deleted meanwhile.
                absent = bool(replaces) and failure.absent
                if failure.conflict or failure.status == 409 or absent:
                    raise Conflict(name) from error
                if not condition or failure.status != 501:
                    raise
            else:
                if not etag:
                    raise BackendUnavailable(
                        f"{self.settings}: writing {name}: the service did not confirm it"
                    )
                return etag
        # A service without conditional writes: the last writer wins, of equal content.
        self._has_conditions = False
        return self.put(name, views, replaces=None)

    def remove(self, name: str) -> None:
        """Deletes an object; an absent one is no error."""
        with failures(self.settings, "deleting"):
            self.client.ask("DELETE", name, _receipt)

    def pages(self, prefix: str) -> Iterator[list[Listed]]:
        """Yields all objects whose name begins with `prefix`, up to 1,000 at a time."""
        pages = iter(
            self.client.boto3.get_paginator("list_objects_v2").paginate(
                Bucket=self.settings.bucket, Prefix=prefix
            )
        )
        last: list[str] = []
        barren = 0
        while True:
            with failures(self.settings, "listing"):
                page = next(pages, None)
            if page is None:
                return
            listed = [
                Listed(found["Key"], int(found["Size"]), found["LastModified"].timestamp())
                for found in page.get("Contents", ())
            ]
            names = [one.name for one in listed]
            barren = barren + 1 if not names or names == last else 0
            if barren > _MOST_BARREN_PAGES:
                raise BackendUnavailable(f"{self.settings}: its listing does not end")
            last = names
            yield listed

    def _span(self, response: AWSResponse) -> tuple[int, int, int]:
        """Returns the first and last byte of a response, and the length of the whole object."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code != 206 or match is None or "etag" not in response.headers:
            raise self._wrong_range(response)
        first, last, total = map(int, match.groups())
        length = str(last - first + 1)
        # A body without a length comes in chunks, or ends with its connection.
        if response.headers.get("content-length", length) != length:
            raise self._wrong_range(response)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding not in {"", "identity", "aws-chunked"}:
            raise BackendUnavailable(
                f"{self.settings}: the service answered with content-encoding '{encoding}', "
                "which was not asked for"
            )
        return first, last, total

    def _wrong_range(self, response: AWSResponse) -> BackendUnavailable:
        headers, status = response.headers, response.status_code
        return BackendUnavailable(
            f"{self.settings}: asked for a range, the service answered {status} with range "
            f"'{headers.get('content-range', 'none')}' of {headers.get('content-length')} bytes"
        )


def _body(response: AWSResponse) -> Any:
    # boto3's, so that errors of its own HTTP library have the names of `Transport`'s.
    return StreamingBody(response.raw, None)  # type: ignore[arg-type]  # of any length


def _receipt(response: AWSResponse) -> str:
    return response.headers.get("etag", "") if response.status_code == 200 else ""


def _opaque(etag: str) -> str:
    # Some services quote the etag in one answer only.
    return etag.removeprefix("W/").strip('"')


def _age(headers: Mapping[str, str]) -> float:
    modified, now = _when(headers.get("last-modified")), _when(headers.get("date"))
    return 0.0 if modified is None else max(0.0, (now or time.time()) - modified)


def _when(text: str | None) -> float | None:
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
