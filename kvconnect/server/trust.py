"""Accepts ``kv_transfer_params`` only from a router, and only for peers of this server."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers

from kvconnect.address import is_loopback
from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import RequestRefused
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.settings import ServerSettings

ROUTER_SECRET_HEADER = "x-kvconnect-router-secret"  # noqa: S105  its name


def check_transfer(settings: ServerSettings, headers: Headers, params: KvTransferParams) -> None:
    """Checks that the sender of `params` may order this transfer.

    Raises:
        RequestRefused: the sender did not prove to be a trusted router, or names an address that is
            no peer of this server (403).
        ConfigurationError: this server's role excludes the transfer.
    """
    if settings.role is None:
        raise _refused(
            "this server takes none: it was started without --role", "kv_transfer_not_served"
        )
    if settings.router_secret is not None:
        given = headers.get(ROUTER_SECRET_HEADER, "").encode("latin-1")
        if not hmac.compare_digest(given, settings.router_secret.encode()):
            raise _refused("only this server's router may send them", "not_the_router")
    for wanted, role in (
        (params.do_remote_decode, "prefill"),
        (params.do_remote_prefill, "decode"),
    ):
        if wanted and settings.role not in {role, "both"}:
            raise ConfigurationError(
                f"kv_transfer_params: they are for role '{role}', this server has role "
                f"'{settings.role}'"
            )
    if params.do_remote_prefill and not _is_peer(settings, params):
        raise _refused(
            f"{params.address} is no peer of this server (--peer)", "kv_transfer_foreign_peer"
        )


def _is_peer(settings: ServerSettings, params: KvTransferParams) -> bool:
    if not settings.peers:
        return is_loopback(params.remote_host or "")
    return params.remote_host in settings.peers or set(params.addresses) <= set(settings.peers)


def _refused(why: str, code: str) -> RequestRefused:
    return RequestRefused(403, f"kv_transfer_params: {why}", code)
