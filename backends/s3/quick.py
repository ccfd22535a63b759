"""The few requests that a request of the engine waits for, without boto3's machinery around them.

boto3 spends a millisecond of Python on each request, most of it on finding out the same things
again. Here they are found out once, by looking at a request that boto3 made, and later ones are
only signed, by the same code. Whatever is not plain sailing is left to boto3: its errors, retries
and redirects are the ones that count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from kvconnect.backends.s3.reply import Reply
from kvconnect.backends.s3.signature import RangeRequests
from kvconnect.backends.s3.transport import Transport
from kvconnect.backends.s3.upload import Upload

__all__ = ["Credentials", "QuickRequests"]

# The header begins with an algorithm and the scope of a key: its name, a date, a region, a service.
_SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=.+/\d{8}/([^/]+)/s3/aws4_request,.*")
_CODE = re.compile(rb"<Code>(\w+)</Code>")
# What a service says instead of an object; whoever says more has something else in mind.
_MOST_SAID = 64 << 10
_UNHASHED = Config(s3={"payload_signing_enabled": False})


class Credentials(Protocol):
    """boto3's, which renews them by itself."""

    def get_frozen_credentials(self) -> Any:
        """A key that is good now."""


class QuickRequests:
    """Gets and puts objects of one bucket. Thread-safe; blocks.

    Args:
        base: URL of the bucket; object names follow.
        region: to sign for.
        credentials: to sign with.
        config: boto3's, which says whether bodies are hashed.
        transport: sends.
    """

    def __init__(
        self, base: str, region: str, credentials: Credentials, config: object, transport: Transport
    ) -> None:
        self._base = base
        self._region = region
        self._credentials = credentials
        self._config = config
        self._transport = transport
        self._service = urlsplit(base)
        self._ranges = RangeRequests(self._service, region)

    @classmethod
    def like(
        cls,
        url: str,
        authorization: str,
        name: str,
        credentials: Credentials,
        config: object,
        transport: Transport,
    ) -> QuickRequests | None:
        """Requests like that of boto3 for object `name`; ``None``: it was not signed as usual."""
        base, signed = url.removesuffix(quote(name, safe="/~")), _SIGNED.fullmatch(authorization)
        if base == url or signed is None:
            return None
        return cls(base, signed[1], credentials, config, transport)

    def get(self, name: str, span: str) -> Reply | None:
        """Bytes `span` of an object.

        Returns:
            ``None`` if boto3 should ask again. Of statuses only 206 and, without a body, 404 (there
            is no such object) come back.
        """
        try:
            request = self._ranges.get(name, span, self._credentials.get_frozen_credentials())
            reply = self._transport.get(self._service, request)
        except BotoCoreError:
            return None
        if reply.status == 206:
            return reply
        with closing(reply.body):
            code = _CODE.search(reply.body.read(_MOST_SAID))
        absent = reply.status == 404 and code is not None and code[1] == b"NoSuchKey"
        return reply if absent else None

    def put(self, name: str, body: Upload, headers: Mapping[str, str]) -> str | None:
        """Write an object.

        Returns:
            Its etag; empty: its condition did not hold; ``None``: boto3 should do it (again).
        """
        try:
            answer = self._transport(self._signed("PUT", name, headers, body, self._config))
        except BotoCoreError:
            return None
        with closing(answer.raw) as raw:
            said = raw.read(_MOST_SAID)
        if answer.status_code == 412:
            return ""
        return None if answer.status_code != 200 or said else answer.headers.get("etag") or None

    def signed(self, method: str, name: str) -> AWSPreparedRequest:
        """A request for an object, to be sent within minutes with whatever body.

        Raises:
            BotoCoreError: there are no credentials.
        """
        return self._signed(method, name, {}, None, _UNHASHED)

    def _signed(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str],
        body: Upload | None,
        config: object,
    ) -> AWSPreparedRequest:
        url = self._base + quote(name, safe="/~")
        request = AWSRequest(method=method, url=url, headers=dict(headers), data=body)
        request.context["client_config"] = config
        frozen = self._credentials.get_frozen_credentials()
        S3SigV4Auth(frozen, "s3", self._region).add_auth(request)
        return request.prepare()
