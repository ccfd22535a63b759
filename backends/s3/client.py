"""A boto3 client for the S3 store."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.utils import get_environ_proxies

from kvconnect.backends.s3.quick import Credentials
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.transport import Transport
from kvconnect.errors import ConfigurationError

__all__ = ["S3Client", "make_client"]

# Beside the first attempt, which is not always boto3's.
_ATTEMPTS = 2
_CONNECT_TIMEOUT_S = 3.0
_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Client:
    """boto3 and what it is made of.

    Attributes:
        boto3: its client.
        credentials: which the client signs with; ``None``: there are none.
        transport: below it; ``None``: boto3's own.
    """

    boto3: Any
    credentials: Credentials | None
    transport: Transport | None


def make_client(settings: S3Settings) -> S3Client:
    """A boto3 client, with the transport below it unless there is a proxy, which boto3 serves.

    Takes a tenth of a second the first time, and reads boto3's configuration; connects to nothing.

    Raises:
        ConfigurationError: the certificates cannot be read.
        BotoCoreError: the profile or region does not exist, or there are no credentials.
    """
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader())
    session = boto3.Session(
        botocore_session=core, profile_name=settings.profile, region_name=settings.region
    )
    # Something has to be signed; other services than AWS do not look at it.
    region = session.region_name or (_DEFAULT_REGION if settings.endpoint_url else None)
    certificates = settings.ca_bundle or core.get_config_variable("ca_bundle")
    client = session.client(
        "s3",
        region_name=region,
        endpoint_url=settings.endpoint_url,
        config=_config(settings),
        verify=certificates,
    )
    meta = client.meta
    meta.events.register("before-call.s3.HeadBucket", _follow_nowhere)
    # Only now is it known where the client goes: the environment or a profile may say.
    if settings.sign_payload is None:
        tls = meta.endpoint_url.startswith("https:")
        meta.config.s3["payload_signing_enabled"] = not tls
    config: Any = meta.config  # the types lack half of it
    if config.proxies or get_environ_proxies(meta.endpoint_url) or config.client_cert:
        return S3Client(client, session.get_credentials(), None)
    transport = Transport(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.timeout_s),
        read_timeout=settings.timeout_s,
        tls=_tls(certificates) if meta.endpoint_url.startswith("https:") else None,
    )
    meta.events.register("before-send.s3", transport)
    return S3Client(client, session.get_credentials(), transport)


def _follow_nowhere(context: dict[str, Any], **_: object) -> None:
    # Redirected without a region, boto3 asks for it with HeadBucket; if that is redirected, too, it
    # asks again, and again, as deep as Python goes.
    context.setdefault("s3_redirect", {})["redirected"] = True


def _config(settings: S3Settings) -> Config:
    # Hashing and checksums cost several times the upload itself. TLS guards the way there, and
    # every block has a checksum of its own, which is looked at when it is loaded.
    return Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.timeout_s),
        read_timeout=settings.timeout_s,
        max_pool_connections=2 * settings.concurrency,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": settings.addressing_style,
            "payload_signing_enabled": bool(settings.sign_payload),
        },
    )


@cache
def _loader() -> Loader:
    # Reading what boto3 knows of S3 takes most of the time it takes to make a client.
    return create_loader(botocore.session.get_session().get_config_variable("data_path"))


def _tls(certificates: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificates or get_cert_path(verify=True))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"ca_bundle={certificates}: {error}") from error
