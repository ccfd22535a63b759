"""The mapping of boto3's errors to those of the `Backend` contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from kvconnect.backends.s3.settings import S3Settings
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.redaction import as_cause, text_without_passwords

_REMEDIES = {
    "NoSuchBucket": "there is no such bucket; make it first",
    "404": "there is no such bucket, or what answers at endpoint_url is no S3 service",
    "InvalidAccessKeyId": "the service does not know this access key",
    "SignatureDoesNotMatch": "the secret key is wrong for this access key",
    "ExpiredToken": "the session's credentials have expired",
    "InvalidToken": "the session's token is wrong",
    "RequestTimeTooSkewed": "this machine's clock and the service's differ too much; set it",
    "AccessDenied": "these credentials may not use it; ListBucket, GetObject, PutObject and "
    "DeleteObject are needed (GetObject and ListBucket to read only)",
    "403": "these credentials may not use it",
    "AuthorizationHeaderMalformed": "the region is wrong; set region=",
    "301": "the bucket is in another region; set region=",
    "PermanentRedirect": "the bucket is in another region; set region=",
}
# The failures that boto3 retries, too.
_PASSING_STATUSES = {429, 500, 502, 503, 504}
_PASSING_CODES = {"RequestTimeout", "SlowDown"}
# The error codes about the clock and the credentials of a request.
_SIGNATURE_CODES = {
    *("RequestTimeTooSkewed", "RequestExpired", "SignatureDoesNotMatch"),
    *("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"),
}
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError)
# Errors that boto3 does not catch: of an answer that it cannot parse (no XML, a bad date, a missing
# name, text instead of fields), and RuntimeError for new credentials that have expired.
_NONSENSE = (
    *(ResponseParserError, ValueError, OverflowError, KeyError, RuntimeError),
    *(AttributeError, TypeError),
)
_MISCONFIGURED = (
    *_NO_CREDENTIALS,
    CredentialRetrievalError,
    InvalidRegionError,
    NoRegionError,
    ParamValidationError,
    ProfileNotFound,
    TokenRetrievalError,
)


class Aborted(Exception):
    """The error that the store was closed. boto3 does not know it, so it does not retry."""

    def __init__(self) -> None:
        super().__init__("the store is closed")


@dataclass(frozen=True, slots=True)
class S3Failure:
    """The service's error response."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, error: ClientError) -> S3Failure:
        """Returns the failure that boto3's `error` carries."""
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return cls(int(status), str(answer.get("Code", "")), str(answer.get("Message", "")))

    @property
    def absent(self) -> bool:
        """Returns whether the object does not exist, though the bucket does."""
        # Any web server answers 404; only this code refers to the object.
        return self.code == "NoSuchKey"

    @property
    def conflict(self) -> bool:
        """Returns whether the condition of a write did not hold."""
        return self.status == 412 or self.code == "PreconditionFailed"

    def __str__(self) -> str:
        code = self.code or str(self.status)
        remedy = _REMEDIES.get(code)
        said = f"{self.status} {code}" if code != str(self.status) else code
        return f"{said}: {remedy or self.message or 'no reason given'}"


def is_passing(error: Exception) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if isinstance(error, ClientError):
        failure = S3Failure.of(error)
        return failure.status in _PASSING_STATUSES or failure.code in _PASSING_CODES
    return isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError))


def is_of_signature(error: Exception) -> bool:
    """Returns whether the same request may succeed if it is signed anew."""
    return isinstance(error, ClientError) and S3Failure.of(error).code in _SIGNATURE_CODES


def was_answered(error: BackendUnavailable) -> bool:
    """Returns whether the service answered the request that failed with `error`."""
    cause = error.__cause__
    return cause is None or isinstance(cause, ClientError)


@contextmanager
def failures(settings: S3Settings, operation: str = "") -> Iterator[None]:
    """Maps errors of boto3 and of connections to the contract's.

    Raises:
        BackendUnavailable: names the store and what went wrong.
    """
    at = f"{settings}: {operation} failed" if operation else str(settings)
    try:
        yield
    except (BackendUnavailable, ConfigurationError):
        raise
    except ClientError as error:
        raise BackendUnavailable(f"{at}: {S3Failure.of(error)}") from error
    except (BotoCoreError, Aborted, OSError) as error:
        # boto3's message contains the endpoint as configured, also by the environment.
        raise BackendUnavailable(f"{at}: {text_without_passwords(str(error))}") from as_cause(error)
    except _NONSENSE as error:
        raise BackendUnavailable(f"{at}: {text_without_passwords(repr(error))}") from as_cause(
            error
        )


@contextmanager
def failures_at_open(settings: S3Settings) -> Iterator[None]:
    """Maps errors during the opening of a store, where wrong settings differ from failures.

    Raises:
        ConfigurationError: no such bucket, no credentials, or they are refused.
        BackendUnavailable: the service cannot be reached, or fails.
    """
    with failures(settings):
        try:
            yield
        except _NO_CREDENTIALS as error:
            raise ConfigurationError(
                f"{settings}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                f"or profile= ({error})"
            ) from error
        except _MISCONFIGURED as error:
            raise ConfigurationError(
                f"{settings}: {text_without_passwords(str(error))}"
            ) from as_cause(error)
        except ClientError as error:
            failure = S3Failure.of(error)
            if failure.status >= 500 or failure.status == 429:
                raise
            raise ConfigurationError(f"{settings}: {failure}") from error
