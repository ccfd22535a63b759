"""The settings of an S3 store, and the parser of its URL."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.redaction import without_passwords

AddressingStyle = Literal["auto", "path", "virtual"]

_PARAMETERS = (
    *("endpoint_url", "region", "profile", "addressing_style", "ca_bundle", "sign_payload"),
    *("blocks_per_object", "part_size", "concurrency", "timeout", "storage_class", "sse"),
    *("sse_kms_key_id", "ttl", "lookup_ttl", "miss_ttl"),
)
_BLOCKS_PER_OBJECT = 8
_PART_NBYTES = 8 << 20
_CONCURRENCY = 16
_TIMEOUT_S = 10.0
_LOOKUP_TTL_S = 60.0
_MISS_TTL_S = 2.0
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or profile="
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """The settings of a store. Credentials are boto3's: environment, profile, role.

    Attributes:
        bucket: the bucket, which must exist.
        prefix: the prefix of all object names, without a slash at its end; may be empty.
        endpoint_url: the URL of an S3-compatible service; ``None``: AWS.
        region: the region; ``None``: boto3's, or ``us-east-1`` with an `endpoint_url` if boto3 has
            none.
        profile: the profile of the AWS configuration files.
        addressing_style: ``virtual`` if the bucket is part of the host name, ``path`` if of the
            path.
        ca_bundle: file of trusted certificates, instead of the usual ones.
        sign_payload: true to sign a hash of uploads; ``None``: only without TLS.
        blocks_per_object: neighbouring blocks of one save that share an object.
        part_nbytes: the bytes of the parts into which longer reads are split, read in parallel.
        concurrency: the most requests at the same time.
        timeout_s: seconds without a byte after which a connection fails.
        storage_class, sse, sse_kms_key_id: the settings of written objects.
        ttl_s: seconds after its save at which a block is no longer found; ``inf``: never.
        lookup_ttl_s, miss_ttl_s: seconds for which the answer "stored", or "absent", is cached.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: AddressingStyle = "auto"
    ca_bundle: str | None = None
    sign_payload: bool | None = None
    blocks_per_object: int = _BLOCKS_PER_OBJECT
    part_nbytes: int = _PART_NBYTES
    concurrency: int = _CONCURRENCY
    timeout_s: float = _TIMEOUT_S
    storage_class: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    ttl_s: float = math.inf
    lookup_ttl_s: float = _LOOKUP_TTL_S
    miss_ttl_s: float = _MISS_TTL_S

    def __post_init__(self) -> None:
        if "@" in self.bucket or ":" in self.bucket:
            _, at, bucket = self.bucket.rpartition("@")
            where = f" before '{bucket}'" if at and ":" not in bucket else ""
            raise ConfigurationError(
                f"s3 store: credentials{where} are not taken from the URL; {_CREDENTIALS}"
            )
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigurationError(
                f"s3 store: bucket '{self.bucket}' is no bucket name; write s3://bucket/prefix"
            )
        _check_endpoint(self.endpoint_url)
        _within("blocks_per_object", self.blocks_per_object, 1, 256)
        _within("concurrency", self.concurrency, 1, 256)
        _within("part_size", self.part_nbytes, 64 << 10, 5 << 30)

    def __str__(self) -> str:
        at = f" at {without_passwords(self.endpoint_url)}" if self.endpoint_url else ""
        return f"s3 store s3://{self.bucket}/{self.prefix}{at}"

    def name(self, kind: str, *parts: str) -> str:
        """Returns the name of an object, or the prefix of such names."""
        # The format's version; other versions use other objects.
        return "/".join((*((self.prefix,) if self.prefix else ()), "v1", kind, *parts))

    @classmethod
    def from_url(cls, url: StoreUrl) -> S3Settings:
        """Parses `url`.

        Raises:
            ConfigurationError: names the parameter, its value and what is right.
        """
        url.allow(*_PARAMETERS)
        if url.query.get("sse_kms_key_id") and not url.query.get("sse"):
            raise ConfigurationError("sse_kms_key_id: needs sse=aws:kms")
        sign = url.choice("sign_payload", "auto", "yes", "no")
        text = url.query.get
        return cls(
            bucket=url.location,
            prefix=url.path.strip("/"),
            endpoint_url=text("endpoint_url"),
            region=text("region"),
            profile=text("profile"),
            addressing_style=_addressing(url),
            ca_bundle=text("ca_bundle"),
            sign_payload=None if sign == "auto" else sign == "yes",
            blocks_per_object=url.whole("blocks_per_object", _BLOCKS_PER_OBJECT),
            part_nbytes=url.size("part_size") or _PART_NBYTES,
            concurrency=url.whole("concurrency", _CONCURRENCY),
            timeout_s=url.duration("timeout") or _TIMEOUT_S,
            storage_class=text("storage_class"),
            sse=text("sse"),
            sse_kms_key_id=text("sse_kms_key_id"),
            ttl_s=url.duration("ttl") or math.inf,
            lookup_ttl_s=_seconds(url, "lookup_ttl", _LOOKUP_TTL_S),
            miss_ttl_s=_seconds(url, "miss_ttl", _MISS_TTL_S),
        )


def _addressing(url: StoreUrl) -> AddressingStyle:
    styles: tuple[AddressingStyle, ...] = ("auto", "path", "virtual")
    chosen = url.choice("addressing_style", *styles)
    return next(style for style in styles if style == chosen)


def _seconds(url: StoreUrl, name: str, default: float) -> float:
    # Unlike other durations these may be 0: answers are not cached.
    if url.query.get(name) in {"0", "0s"}:
        return 0.0
    given = url.duration(name)
    return default if given is None else given


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigurationError(f"{name}={value}: must be between {low} and {high}")


def _check_endpoint(endpoint_url: str | None) -> None:
    if endpoint_url is None:
        return
    try:
        parts = urlsplit(endpoint_url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    shown = without_passwords(endpoint_url)
    if good and "@" in parts.netloc:
        raise ConfigurationError(
            f"endpoint_url={shown}: credentials are not taken from it; {_CREDENTIALS}"
        )
    if not good:
        raise ConfigurationError(
            f"endpoint_url={shown}: a URL such as https://minio.example:9000 is needed"
        )
