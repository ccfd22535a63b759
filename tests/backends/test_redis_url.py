"""What Redis URLs mean, and what is said of those that mean nothing."""

from __future__ import annotations

import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.redis.settings import Address, Mode, RedisSettings, Tls
from kvconnect.backends.redis.store import RedisBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError


def parsed(text):
    return RedisSettings.from_url(StoreUrl.parse(text))


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("redis://host", RedisSettings((Address("host", 6379),))),
        ("redis://host:7000/3", RedisSettings((Address("host", 7000),), db=3)),
        ("redis://[::1]:7000", RedisSettings((Address("::1", 7000),))),
        ("redis://[::1]", RedisSettings((Address("::1", 6379),))),
        (
            "redis://me:p%40ss%2F%3A@host?ttl=7d&prefix=kv:&connections=8&timeout=2s",
            RedisSettings(
                (Address("host", 6379),),
                username="me",
                password="p@ss/:",
                ttl=604800.0,
                prefix="kv:",
                connections=8,
                timeout=2.0,
            ),
        ),
        ("redis://:secret@host", RedisSettings((Address("host", 6379),), password="secret")),
        ("redis+unix:///run/r.sock", RedisSettings((Address("/run/r.sock", 0),))),
        (
            "redis+unix://me:x@/run/r.sock?db=2",
            RedisSettings((Address("/run/r.sock", 0),), db=2, username="me", password="x"),
        ),
        ("rediss://host", RedisSettings((Address("host", 6379),), tls=Tls())),
        (
            "rediss://host?tls_verify=no",
            RedisSettings((Address("host", 6379),), tls=Tls(verify=False)),
        ),
        (
            "redis+cluster://a:1,b:2,c?tls=yes",
            RedisSettings(
                (Address("a", 1), Address("b", 2), Address("c", 6379)),
                mode=Mode.CLUSTER,
                tls=Tls(),
            ),
        ),
        (
            "redis+sentinel://me:x@a,b:2/mymaster/1?sentinel_user=s&sentinel_password=t",
            RedisSettings(
                (Address("a", 26379), Address("b", 2)),
                mode=Mode.SENTINEL,
                service="mymaster",
                db=1,
                username="me",
                password="x",
                sentinel_username="s",
                sentinel_password="t",
            ),
        ),
    ],
)
def test_url_means(url, settings):
    assert parsed(url) == settings
    assert isinstance(open_backend(url).inner, RedisBackend)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis:", "host or host:port is needed"),
        ("redis:///0", "host or host:port is needed"),
        ("redis://host:port", r"host 'host:\*\*\*': host or host:port is"),
        ("redis://host:0", "port 0: must be from 1"),
        ("redis://host:70000", "port 70000"),
        ("redis://a,b", r"redis takes one host.*redis\+cluster"),
        ("redis://host/zero", "path '/zero': the number of a database"),
        ("redis://host/0/1", "path '/0/1'"),
        ("redis+cluster://host/1", "a cluster has no database but 0"),
        ("redis+sentinel://host", "the name of the service is needed"),
        ("redis+sentinel://host/name/x", "the number of a database"),
        ("redis+unix://host/run/r.sock", r"path of a socket is needed, as in redis\+unix:///run"),
        ("redis+unix:", "path of a socket is needed"),
        ("redis+unix:///run/r.sock?db=x", "db=x: a whole number"),
        ("redis+unix:///run/r.sock?tls_verify=no", "unknown parameter 'tls_verify'"),
        ("unix:///run/r.sock", "did you mean 'redis[+]unix'"),
        ("redis://host?tll=7d", "unknown parameter 'tll'; did you mean 'ttl'"),
        ("redis://host?capacity=1GiB", "unknown parameter 'capacity'"),
        ("redis://host?tls=yes", "unknown parameter 'tls'"),
        ("redis://host?ttl=soon", "ttl=soon: a duration"),
        ("redis://host?ttl=0", "ttl=0"),
        ("redis://host?connections=0", "connections=0: must be from 1 to 64"),
        ("redis://host?connections=many", "connections=many: a whole number"),
        ("redis://host?timeout=0", "timeout=0"),
        ("redis://host?timeout=0.0001ms", "timeout=1e-07: must be at least one millisecond"),
        ("redis://host?prefix=%7Btag%7D", "prefix='{tag}'"),
        ("redis://host?prefix=a%20b", "prefix='a b'"),
        ("redis://host?tls_ca=/etc/hostname", "no TLS; write rediss://"),
        ("redis+cluster://host?tls_verify=no", "no TLS; write tls=yes"),
        ("redis+cluster://host?tls=maybe", "tls=maybe"),
        ("rediss://host?tls_ca=/no/such", "tls_ca=/no/such: there is no such file"),
        ("rediss://host?tls_key=/etc/hostname", "is the key of tls_cert, which is missing"),
        ("redis://me:secret@host:port", "host or host:port is needed"),
        ("redis+sentinel://host/name/x?sentinel_password=secret", "number of a database"),
        ("redis+sentinel://me:secret@host/name?what=secret1", "unknown parameter"),
    ],
)
def test_wrong_url_says_what_is_wrong(url, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        open_backend(url)
    assert "secret" not in str(caught.value)
