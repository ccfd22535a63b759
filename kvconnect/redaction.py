"""Hides passwords, and what may be one, as ``***`` in printed URLs.

Only `shown_url` prints URLs. It hides more than the passwords of valid URLs, because invalid ones
are printed, too: of ``redis://me:pa/ss@host`` the host is ``me``, and a parameter ``passwd`` does
not exist. It shows user, hosts, ports, paths and the parameters that are known to hold no secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, takewhile
from urllib.parse import unquote, unquote_plus

HIDDEN = "***"

_HARMLESS = frozenset(
    (
        *("codec", "key_file", "capacity", "ttl", "durability", "pin_fraction", "quota"),
        *("connections", "db", "prefix", "sentinel_user", "timeout"),
        *("tls", "tls_ca", "tls_cert", "tls_key", "tls_verify"),
        *("addressing_style", "blocks_per_object", "ca_bundle", "concurrency", "endpoint_url"),
        *("lookup_ttl", "miss_ttl", "part_size", "profile", "region", "sign_payload"),
        *("sse", "sse_kms_key_id", "storage_class"),
        *("deadline", "patience", "promote", "queue", "tiers", "write"),
        *("advertise", "device", "directory", "lease", "listen", "secret_file", "staging"),
        *("transport", "verify"),
    )
)
"""The parameters whose values are shown.

For all others, also misspelt ones, only the names are shown."""

_URLS = {"directory", "endpoint_url", "tiers"}
# Their path is a file's, in which "@" is nothing special as long as no host stands before it.
_OF_FILES = {"disk"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_NAME = re.compile(r"[A-Za-z][\w.-]*")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^:\[\]@]*)(?::\d{0,5})?")
# Clients of a server write the searched text: no pattern may backtrack over it.
_SCHEME_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++(?=://)")
_LETTER = re.compile(r"[A-Za-z]")
_END_IN_TEXT = re.compile(r"""(?<![.,:;])[.,:;]*+(?:([\s'"<>()])|$)""")
_SECRET_IN_TEXT = re.compile(r"(?i)(?<!\w)((?=\w*?(?:passw|pwd|secret))\w++=)[^&,\s]+")


def without_passwords(url: str) -> str:
    """Returns `url`, right or wrong, as `shown_url` prints it."""
    scheme, colon, rest = url.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        scheme, rest = "", url
    rest, mark, fragment = rest.partition("#")
    head, _, query = rest.partition("?")
    location: str | None = None
    path = head
    if head.startswith("//"):
        location, slash, path = head[2:].partition("/")
        path = slash + path
    fields = (field.partition("=") for field in query.split("&") if field)
    pairs = [
        (unquote_plus(name), _decoded(name, value)) if equals else ("", name)
        for name, equals, value in fields
    ]
    return shown_url(
        scheme, location=location, path=unquote(path), query=pairs, fragment=mark + fragment
    )


def shown_url(
    scheme: str,
    *,
    location: str | None = None,
    path: str = "",
    query: Iterable[tuple[str, str]] = (),
    fragment: str = "",
) -> str:
    """Returns the URL of these parts, without any text that may be a password.

    Args:
        scheme: empty: there is none.
        location: user, password, hosts and ports as written; ``None``: no "//".
        path: percent-decoded.
        query: names and decoded values of the parameters; an empty name: the parameter has no "=".
        fragment: what follows the path and parameters, with its "#".
    """
    start = f"{scheme}:" if scheme else ""
    fields = list(query)
    if _is_torn(location or "", fields, fragment):
        return start + HIDDEN
    userinfo, hosts, path = _head(scheme, location, path)
    start += ("//" if location is not None or (scheme and path[:1] == "/") else "") + userinfo
    if not is_hosts(hosts):
        return start + _shown_hosts(hosts)  # the rest may be part of a password
    shown = "&".join(f"{name}={value}" if value else name for name, value in shown_fields(fields))
    start += hosts + path + ("?" if shown else "") + shown
    return start + ("#" + HIDDEN if fragment else "")


def shown_fields(query: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields name and value of each parameter in a form that may be printed.

    A parameter after a hidden value, or with an "@", may be the rest of a password that contains
    "?" or "&". Then the name of an unknown parameter is hidden, too, and the value is empty.
    """
    hidden = False
    for name, value in query:
        if name in _HARMLESS:
            shown = _shown_value(name, value)
            hidden = hidden or shown.endswith(HIDDEN)
            yield name, shown
        elif _NAME.fullmatch(name) and not hidden and "@" not in value:
            hidden = True
            yield name, HIDDEN
        else:
            hidden = True
            yield HIDDEN, ""


def with_marked_commas(value: str) -> str:
    """Returns the list `value` of a URL's parameter decoded, except the commas of its members.

    Those are ``%2C``, as they were written: a comma separates two members.
    """
    return ",".join(unquote_plus(member).replace(",", "%2C") for member in value.split(","))


def is_hosts(location: str) -> bool:
    """Returns whether `location` may be hosts and ports, without a user: ``a:6379,[::1]:6379``."""
    return all(_HOST.fullmatch(host) for host in location.split(","))


def text_without_passwords(text: str) -> str:
    """Returns `text`, written by another program, without the passwords of the URLs in it.

    The end of a URL with spaces in its password is unknown: all up to the last "@" of the line
    counts as user and password.
    """
    shown, done = [], 0
    for start, following in pairwise([*_urls_in(text), len(text)]):
        line_end = text.find("\n", start, following)
        stop = following if line_end < 0 else line_end
        last = _END_IN_TEXT.search(text, max(start, text.rfind("@", start, stop)), stop)
        # Right before the next URL no punctuation is the end of a sentence.
        cut = last is None or (last[1] is None and stop == following < len(text))
        end = stop if last is None or cut else last.start()
        shown += [text[done:start], without_passwords(text[start:end])]
        done = end
    return _SECRET_IN_TEXT.sub(rf"\1{HIDDEN}", "".join([*shown, text[done:]]))


def _urls_in(text: str) -> Iterator[int]:
    """Yields the positions where URLs begin."""
    for match in _SCHEME_IN_TEXT.finditer(text):
        if letter := _LETTER.search(text, match.start(), match.end()):
            yield letter.start()


def as_cause(
    error: BaseException, hide: Callable[[str], str] = text_without_passwords
) -> BaseException | None:
    """Returns `error`, to raise from; ``None`` if its traceback would show what `hide` hides."""
    one: BaseException | None = error
    while one is not None:
        if hide(str(one)).count(HIDDEN) > str(one).count(HIDDEN):
            return None
        one = one.__cause__ or one.__context__
    return error


def _decoded(name: str, value: str) -> str:
    return with_marked_commas(value) if name == "tiers" else unquote_plus(value)


def _is_torn(location: str, query: Iterable[tuple[str, str]], fragment: str) -> bool:
    """Returns whether the "@" after a password may follow a "?" or "#" in the password.

    All of the URL may then be a password.
    """
    odd = [f"{name}{value}" for name, value in query if name not in _HARMLESS]
    if "@" in fragment or any("@" in one for one in odd):
        return True
    return not is_hosts(location.rpartition("@")[2]) and any("@" in value for _, value in query)


def _head(scheme: str, location: str | None, path: str) -> tuple[str, str, str]:
    """Returns the user in a form that may be printed, the hosts, and the path after them."""
    if scheme in _OF_FILES and not location:
        return "", "", path
    userinfo, at, rest = f"{location or ''}{path}".rpartition("@")
    user, colon, _ = userinfo.partition(":")
    shown = f"{user}:{HIDDEN}" if colon and "/" not in user else HIDDEN
    hosts, slash, path = rest.partition("/")
    return shown + at if at else "", hosts, slash + path


def _shown_hosts(hosts: str) -> str:
    """Returns `hosts` up to the first invalid one."""
    each = hosts.split(",")
    sound = list(takewhile(_HOST.fullmatch, each))
    return ",".join([*sound, shown_host(each[len(sound)])])


def shown_host(text: str) -> str:
    """Returns the host and port `text` of a URL; if it is none, the safe part: ``user:***``."""
    if _HOST.fullmatch(text):
        return text
    host, colon, _ = text.partition(":")
    return f"{host}:{HIDDEN}" if colon else HIDDEN


def _shown_value(name: str, value: str) -> str:
    if name not in _URLS:
        return without_passwords(value) if "://" in value else value
    urls = value.split(",") if name == "tiers" else [value]
    for url in urls:
        scheme, _, rest = url.strip().partition(":")
        # Otherwise there may be a comma in a password, and this is a piece of it.
        if not _SCHEME.fullmatch(scheme) or (
            "@" in rest and not rest.startswith("//") and scheme not in _OF_FILES
        ):
            return HIDDEN
    # A comma within a tier's own URL is written %2C: between hosts it is one.
    shown = [without_passwords(url.replace("%2C", ",")).replace(",", "%2C") for url in urls]
    lost = any(one.endswith(HIDDEN) for one in shown[:-1])
    return HIDDEN if lost else ",".join(shown)
