"""``s3:`` keeps the contract."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from s3_server import BUCKET, S3Server

from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.store import S3Backend
from kvconnect.testing import Address, BackendConformance
from kvconnect.testing.checks import all_checks


class TestS3(BackendConformance):
    deadline_s = 1.5  # making a client takes boto3 half a second on a busy machine
    ends_cancelled = True
    random_runs = 8  # a run takes two thirds of a second

    @pytest.fixture(autouse=True)
    def server(self, monkeypatch: pytest.MonkeyPatch, tmp_path):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / name.lower()))
        credentials = tmp_path / "aws_shared_credentials_file"
        credentials.write_text(
            "[default]\naws_access_key_id=tester\naws_secret_access_key=secret\n"
        )
        self.credentials = str(credentials)
        self._server = S3Server()
        self.address = Address("127.0.0.1", self._server.port)
        yield
        self._server.stop()

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address, **options):
        os.environ["AWS_SHARED_CREDENTIALS_FILE"] = self.credentials  # in child processes, too
        endpoint = f"http://{address.host}:{address.port}"
        forgetful = {"lookup_ttl_s": 0.0, "miss_ttl_s": 0.0, "timeout_s": 5.0}
        return S3Backend(
            S3Settings(bucket=BUCKET, prefix="kv", endpoint_url=endpoint, **forgetful, **options)
        )

    def make_expiring(self, ttl_s):
        return self.make_via(self.address, ttl_s=ttl_s)

    async def restart_server(self, *, empty):
        before = self._server
        before.stop()
        self._server = S3Server(before.port)
        if not empty:
            self._server.objects.update(before.objects)


class TestS3Longer(TestS3):
    """As many random runs as other stores have, in the long form."""

    random_runs = BackendConformance.random_runs
    skip: ClassVar = {
        one.id: "shown by TestS3" for one in all_checks() if one.name != "random_operations"
    }
