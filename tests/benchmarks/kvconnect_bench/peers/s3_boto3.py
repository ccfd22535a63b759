"""Writes and reads values with boto3 in its ordinary way."""

from __future__ import annotations

import secrets
from typing import Any

import boto3

from kvconnect.backends.s3.settings import S3Settings
from kvconnect.bench.store.floor import seconds_on_threads
from kvconnect.bench.store.payloads import Payloads


class Boto3:
    """A boto3 client alone, with objects of `step` values each. Blocks; thread-safe.

    Attributes:
        how: boto3 is used, in words.
        names: of the objects.
        payloads: the values of the objects.
    """

    def __init__(self, settings: S3Settings, payloads: Payloads, step: int) -> None:
        what = "one object per value" if step == 1 else f"objects of {step} values"
        self.how = f"boto3, {what}"
        self.payloads = payloads
        self._bucket = settings.bucket
        self._client: Any = boto3.Session(profile_name=settings.profile).client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region or ("us-east-1" if settings.endpoint_url else None),
            verify=settings.ca_bundle,
        )
        stem = secrets.token_hex(8)
        blocks = payloads.blocks
        self._objects = {
            settings.name("bench", stem, str(start)): [
                block.data.numpy().data for block in blocks[start : start + step]
            ]
            for start in range(0, payloads.count, step)
        }
        self.names = list(self._objects)

    def put(self, name: str) -> None:
        """Writes one object."""
        # `put_object` takes bytes in one piece; a user would have to join them, too.
        body = b"".join(self._objects[name])
        self._client.put_object(Bucket=self._bucket, Key=name, Body=body)

    def get(self, name: str) -> None:
        """Reads one object."""
        self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()

    def get_all(self, at_once: int) -> float:
        """Returns the seconds to read all objects, so many at once."""
        return seconds_on_threads(at_once, self.get, self.names)

    def put_all(self, at_once: int) -> float:
        """Returns the seconds to write all objects, so many at once."""
        return seconds_on_threads(at_once, self.put, self.names)

    def close(self) -> None:
        """Deletes the objects."""
        for name in self.names:
            self._client.delete_object(Bucket=self._bucket, Key=name)
        self._client.close()
