"""The requests for the objects of a bucket: signed by botocore, sent by `Transport`, retried.

boto3's own methods spend two milliseconds of Python on a request, most of it on resolving the same
settings again. Here they are resolved once, from a request that boto3 made.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote

import boto3
import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.parsers import create_parser
from botocore.utils import get_environ_proxies

from kvconnect.backends.s3.connections import Connections
from kvconnect.backends.s3.errors import S3Failure, is_of_signature, is_passing
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.transport import MOST_OF_ERROR, Transport, Upload
from kvconnect.errors import ConfigurationError

T = TypeVar("T")

_ATTEMPTS = 3
# The most attempts of requests that boto3 makes itself.
_BOTO3_ATTEMPTS = 2
_CONNECT_TIMEOUT_S = 3.0
_DEFAULT_REGION = "us-east-1"
# A service accepts a signature for a quarter of an hour.
_SIGNED_FOR_S = 60.0
_MOST_SIGNED = 4096
_PARSER: Any = create_parser("rest-xml")


@dataclass(frozen=True, slots=True)
class _Signed:
    """A signed GET of an object: its URL, its headers, and until when it may be sent again."""

    url: str
    headers: dict[str, str]
    until: float


class S3Client:
    """A client of one bucket of a service. Thread-safe; every method blocks.

    Making the first client takes a tenth of a second, and reads boto3's configuration. It makes no
    connection.

    Args:
        settings: the store's settings.

    Attributes:
        boto3: boto3's client, for rare requests.
        transport: sends the requests; ``None``: boto3's own transport, for a proxy with TLS itself.

    Raises:
        ConfigurationError: the certificates cannot be read.
        BotoCoreError: the profile or region does not exist.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.boto3, certificates = _boto3_client(settings)
        self.transport = _transport(self.boto3.meta, certificates)
        self._send: Callable[[AWSPreparedRequest], AWSResponse]
        if self.transport is None:
            self._send = self.boto3._endpoint.http_session.send  # noqa: SLF001
        else:
            self._send = self.transport
            self.boto3.meta.events.register("before-send.s3", self.transport)
        self._url = ""
        self._context: Mapping[str, Any] = {}
        # By name; operations on the dict are atomic, so threads need no lock.
        self._signed: dict[str, _Signed] = {}

    def look(self, bucket: str, name: str) -> None:
        """Makes boto3 request the absent object `name`, and records its URL and signing context.

        Raises:
            ClientError, BotoCoreError: the errors of boto3's request, unless the object is absent.
        """
        asked: list[AWSRequest] = []

        def watch(request: AWSRequest, **_: object) -> None:
            asked.append(request)

        event = "request-created.s3.GetObject"
        self.boto3.meta.events.register(event, watch)
        try:
            # Not HEAD for the bucket, because an answer to HEAD has no body with the error.
            self.boto3.get_object(Bucket=bucket, Key=name)["Body"].close()
        except ClientError as error:
            if not S3Failure.of(error).absent:
                raise
        finally:
            self.boto3.meta.events.unregister(event, watch)
        # If the bucket is in another region, boto3 sends the request again; the last one is right.
        self._url = str(asked[-1].url).removesuffix(_quoted(name))
        self._context = dict(asked[-1].context)

    def ask(
        self,
        method: str,
        name: str,
        take: Callable[[AWSResponse], T],
        *,
        headers: Mapping[str, str] | None = None,
        views: Sequence[memoryview | bytes] | None = None,
    ) -> T:
        """Sends a request and returns the result of `take`; retries passing failures.

        Args:
            method: the HTTP method.
            name: the name of the object.
            take: reads the body of a successful response; called again if the body broke off.
            headers: further headers beside those of the signature.
            views: the request's body.

        Raises:
            ClientError: the service refuses.
            BotoCoreError, Aborted: the request was not sent, or its response broke off.
        """
        attempt = 1
        while True:
            body = None if views is None else Upload(views)
            shared = method == "GET" and name in self._signed
            try:
                response = self._send(self.signed(method, name, headers=headers, body=body))
                with closing(response.raw):
                    _check(method, response)
                    return take(response)
            except (BotoCoreError, ClientError) as error:
                self._signed.pop(name, None)
                # The machine may have slept since the signature, or its credentials were replaced.
                stale = shared and is_of_signature(error)
                if attempt == _ATTEMPTS or not (stale or is_passing(error)):
                    raise
            time.sleep(random.uniform(0, attempt - 1))
            attempt += 1

    def signed(
        self,
        method: str,
        name: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Upload | None = None,
    ) -> AWSPreparedRequest:
        """Returns a signed request for object `name`, to be sent within minutes.

        Raises:
            BotoCoreError: there are no credentials.
        """
        if method != "GET":
            return self._sign(method, name, headers or {}, body)
        # One signature serves all ranges of an object, because it need not include the range.
        found = self._signed.get(name)
        if found is None or time.monotonic() >= found.until:
            request = self._sign(method, name, {}, None)
            found = _Signed(
                request.url, dict(request.headers.items()), time.monotonic() + _SIGNED_FOR_S
            )
            if len(self._signed) >= _MOST_SIGNED:
                self._signed = {}
            self._signed[name] = found
        given: Any = {**found.headers, **(headers or {})}
        return AWSPreparedRequest(method, found.url, given, None, stream_output=True)

    def _sign(
        self, method: str, name: str, headers: Mapping[str, str], body: Upload | None
    ) -> AWSPreparedRequest:
        request = AWSRequest(
            method=method,
            url=self._url + _quoted(name),
            headers=dict(headers),
            data=body,
            stream_output=True,  # boto3's own transport would read the body to see it
        )
        request.context.update(self._context)
        self.boto3._request_signer.sign("GetObject", request)  # noqa: SLF001
        return request.prepare()

    def close(self) -> None:
        """Ends requests in flight with an error, and closes all connections."""
        if self.transport is not None:
            self.transport.connections.abort()
        self.boto3.close()


def _quoted(name: str) -> str:
    return quote(name, safe="/~")


def _check(method: str, response: AWSResponse) -> None:
    status = response.status_code
    if method == "GET" and status < 300:
        return
    raw: Any = response.raw
    body = raw.read(MOST_OF_ERROR)
    if status < 300:
        # Some errors have the status of a success.
        if b"<Error>" not in body:
            return
        status = 500
    said = {"status_code": status, "headers": response.headers, "body": body}
    raise ClientError(_PARSER.parse(said, None), method)


def _boto3_client(settings: S3Settings) -> tuple[Any, str | None]:
    """Returns boto3's client, and the file of certificates that it trusts."""
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader())
    session = boto3.Session(
        botocore_session=core, profile_name=settings.profile, region_name=settings.region
    )
    # A region has to be signed; other services than AWS do not check it.
    region = session.region_name or (_DEFAULT_REGION if settings.endpoint_url else None)
    certificates = settings.ca_bundle or core.get_config_variable("ca_bundle")
    client: Any = session.client(  # the types lack half of it
        "s3",
        region_name=region,
        endpoint_url=settings.endpoint_url,
        config=_config(settings),
        verify=certificates,
    )
    client.meta.events.register("before-call.s3.HeadBucket", _follow_nowhere)
    # The endpoint is known only now, because the environment or a profile may set it.
    if settings.sign_payload is None:
        tls = client.meta.endpoint_url.startswith("https:")
        client.meta.config.s3["payload_signing_enabled"] = not tls
    return client, certificates


def _follow_nowhere(context: dict[str, Any], **_: object) -> None:
    # After a redirect without a region, boto3 sends HeadBucket; if that is redirected, too, it
    # repeats that until Python's recursion limit.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _config(settings: S3Settings) -> Config:
    # Hashing and checksums cost several times the upload itself. TLS protects the upload, and every
    # block has a checksum of its own, which is checked when it is loaded.
    return Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.timeout_s),
        read_timeout=settings.timeout_s,
        max_pool_connections=2 * settings.concurrency,
        retries={"mode": "standard", "total_max_attempts": _BOTO3_ATTEMPTS},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": settings.addressing_style,
            "payload_signing_enabled": bool(settings.sign_payload),
        },
    )


@cache
def _loader() -> Loader:
    # Loading boto3's data about S3 takes most of the time of making a client.
    return create_loader(botocore.session.get_session().get_config_variable("data_path"))


def _transport(meta: Any, certificates: str | None) -> Transport | None:
    """Returns our transport; ``None`` if the proxy requires boto3's, because it has TLS itself."""
    config, proxies = meta.config, get_environ_proxies(meta.endpoint_url)
    proxy = proxies.get(meta.endpoint_url.partition(":")[0], "")
    if proxy.startswith("https:"):
        return None
    tls = None
    if meta.endpoint_url.startswith("https:"):
        try:
            tls = ssl.create_default_context(cafile=certificates or get_cert_path(verify=True))
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"ca_bundle={certificates}: {error}") from error
    return Transport(
        Connections(
            connect_timeout=config.connect_timeout,
            read_timeout=config.read_timeout,
            tls=tls,
            proxies=proxies,
        )
    )
