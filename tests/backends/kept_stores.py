"""Stores whose bytes were kept from an earlier version, and how they were made.

``python tests/backends/kept_stores.py`` writes them anew: to be run on the code of a version whose
stores must be readable from then on, never on newer code to make a test pass.
"""

from __future__ import annotations

import asyncio
import base64
import json
import lzma
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from redis_server import RedisServer
from s3_server import BUCKET, S3Server

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.keys import Namespace, Shard, chain_key, model_tag, root_key, store_key
from kvconnect.layout import KvCacheLayout

FOLDER = Path(__file__).with_name("kept")
LAYOUT = KvCacheLayout(2, 1, 8, 8, 4, torch.float32)
MODEL_DIGEST = bytes(range(32))
NAMESPACE = Namespace(cache_salt="tenant")
SHARD = Shard(tp_rank=1, tp_size=2)
TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 2**31 - 1]]
PRIORITIES = [35, 80, 35, 0, 35]
CODECS = {"plain": {}, "encoded": {"codec": "zstd+aes-gcm"}}
CIPHER_KEY = bytes(range(1, 33))


def blocks() -> list[StoredBlock]:
    """A chain of four blocks and a tail, with all that is known of them."""
    parent = root_key(MODEL_DIGEST, (LAYOUT,), NAMESPACE)
    made = []
    for tokens, priority in zip(TOKENS, PRIORITIES, strict=True):
        array = np.array(tokens, np.int32)
        key = chain_key(parent, array)
        data = torch.zeros(frame.frame_nbytes(LAYOUT.block_nbytes), dtype=torch.uint8)
        frame.payload(data, LAYOUT.block_nbytes).copy_(payload(key))
        made.append(
            StoredBlock(
                store_key(key, 0, SHARD),
                data,
                store_key(parent, 0, SHARD),
                array,
                priority,
                NAMESPACE.encode(),
                model_tag(MODEL_DIGEST, (LAYOUT,)),
            )
        )
        parent = key
    return made


def payload(key: bytes) -> torch.Tensor:
    """The bytes of the block of the chained key `key`."""
    nbytes = LAYOUT.block_nbytes
    whole = (key * (nbytes // len(key) + 1))[:nbytes]
    return torch.from_numpy(np.frombuffer(whole, np.uint8).copy())


def key_file(folder: Path) -> Path:
    """The secret key of the encoded stores."""
    path = folder / "key"
    path.write_bytes(CIPHER_KEY)
    path.chmod(0o600)
    return path


def options(kind: str, folder: Path) -> dict[str, Any]:
    """What `open_backend` is told for a ``plain`` or an ``encoded`` store."""
    own = dict(CODECS[kind])
    return {**own, "key_file": str(key_file(folder))} if own else {}


async def _fill(url: str, kind: str, folder: Path) -> None:
    store = open_backend(url, **options(kind, folder))
    await store.open([LAYOUT])
    made = blocks()
    assert await store.save(made[:3]) == 3
    assert await store.save(made[3:]) == 2
    await store.close()


# ---------------------------------------------------------------------- media


def disk_url(path: Path) -> str:
    return f"disk://{path}?capacity=1MiB"


def pack_disk(path: Path) -> dict[str, str]:
    """Every file by its name, its bytes compressed and in base 64."""
    return {file.name: _text(lzma.compress(file.read_bytes())) for file in sorted(path.iterdir())}


def unpack_disk(kept: dict[str, str], path: Path) -> None:
    path.mkdir()
    for name, text in kept.items():
        (path / name).write_bytes(lzma.decompress(_bytes(text)))


def pack_redis(client: redis.Redis) -> dict[str, Any]:
    """Every key with its type and value, bytes in base 64."""
    found: dict[str, Any] = {}
    for key in sorted(client.scan_iter()):
        if (kind := client.type(key).decode()) == "string":
            found[_text(key)] = [kind, _text(client.get(key))]
        else:
            members = client.zrange(key, 0, -1, withscores=True)
            found[_text(key)] = [kind, [[_text(one), score] for one, score in members]]
    return found


def unpack_redis(kept: dict[str, Any], client: redis.Redis) -> None:
    for key, (kind, value) in kept.items():
        if kind == "string":
            client.set(_bytes(key), _bytes(value))
        else:
            client.zadd(_bytes(key), {_bytes(one): score for one, score in value})


def pack_s3(server: S3Server) -> dict[str, str]:
    """Every object by its name, bytes in base 64."""
    return {name: _text(found[0]) for name, found in sorted(server.objects.items())}


def unpack_s3(kept: dict[str, str], server: S3Server) -> None:
    for number, (name, text) in enumerate(kept.items()):
        server.objects[name] = (_bytes(text), f'"kept-{number}"', 1_790_000_000.0)


def s3_url(server: S3Server) -> str:
    return f"s3://{BUCKET}/kv?endpoint_url={server.endpoint}&lookup_ttl=0&miss_ttl=0"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def main(kinds: Sequence[str] = tuple(CODECS)) -> None:
    """Write the kept stores."""
    os.environ.update(AWS_ACCESS_KEY_ID="tester", AWS_SECRET_ACCESS_KEY="secret")
    FOLDER.mkdir(exist_ok=True)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            asyncio.run(_fill(disk_url(folder / "disk"), kind, folder))
            (FOLDER / f"disk-{kind}.json").write_text(json.dumps(pack_disk(folder / "disk")))
            server = RedisServer(folder / "redis").start()
            asyncio.run(_fill(f"{server.url}?prefix=kv:", kind, folder))
            (FOLDER / f"redis-{kind}.json").write_text(json.dumps(pack_redis(server.admin)))
            server.stop()
            bucket = S3Server()
            asyncio.run(_fill(s3_url(bucket), kind, folder))
            (FOLDER / f"s3-{kind}.json").write_text(json.dumps(pack_s3(bucket)))
            bucket.stop()


if __name__ == "__main__":
    main()
