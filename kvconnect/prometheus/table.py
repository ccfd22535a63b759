"""The table of metrics: their names, descriptions, and counters or gauges."""

from __future__ import annotations

from kvconnect.digest.doubts import Doubt
from kvconnect.overlap import Decision
from kvconnect.prometheus.readers import (
    Names,
    by_label,
    calls_in_flight,
    distribution,
    each,
    of_calls,
    of_each_call,
    of_stores,
    outcomes,
    sizes,
    store_sizes,
    totals,
)
from kvconnect.prometheus.snapshot import Metric
from kvconnect.trace import SIZES, TIMES

_OPERATIONS = ("lookup", "load", "save", "delete", "children", "open", "close")
_FAILURES = ("failure", "timeout", "refused", "bad_frame", "other_codec")
_PULL_FAILURES = ("peer", "corrupt", "refused", "deadline", "abandoned", "closed")
_LEASE_EVENTS = (
    *("offered", "no_room", "granted", "claims_refused", "released", "aborted", "expired"),
    "late_messages",
)
_CONTROL_FAULTS = (
    *("refused", "not_opened", "pushed_out", "not_connected", "silent", "bad_message", "not_taken"),
)
_DAMAGED: Names = {
    ("messages",): "transfer.control.damaged",
    ("requests",): "transfer.tcp.malformed",
    ("pieces",): "transfer.pull.corrupt",
    ("digests",): "transfer.bad_digests",
}
_STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504)
_HOOKS = ("may_load", "may_save", "on_hit", "priority")
_ROLES = ("prefill", "decode")

_STORE = ("store", "place")
_CALL = (*_STORE, "operation")

METRICS: tuple[Metric, ...] = (
    Metric(
        "kvconnect_requests_total",
        "Requests that ended; each looked its prompt up.",
        totals({(): "engine.request"}),
    ),
    Metric(
        "kvconnect_uncached_requests_total",
        "Requests whose KV keys cannot tell apart: neither looked up nor saved; by the reason, as "
        "in `kvconnect.digest.doubts`.",
        by_label("engine.request.uncached", "reason", [doubt.value for doubt in Doubt]),
        ("reason",),
    ),
    Metric(
        "kvconnect_live_requests",
        "Requests in the engine: waiting, loading, running, or kept until they are saved.",
        sizes(each("engine.requests.{}", ("waiting", "loading", "running", "saving"))),
        ("state",),
    ),
    Metric(
        "kvconnect_http_answers_total",
        "Answers over HTTP by status; 499: the client left before there was one.",
        totals(each("server.answer.{}", _STATUSES)),
        ("status",),
    ),
    Metric(
        "kvconnect_first_token_seconds",
        "From when a prompt of a request over HTTP came to the engine to its first token.",
        distribution("server.first_token.seconds"),
        ("model",),
        TIMES,
    ),
    Metric(
        "kvconnect_between_tokens_seconds",
        "Mean time between the tokens of an answer over HTTP, of each answer.",
        distribution("server.between_tokens.seconds"),
        ("model",),
        TIMES,
    ),
    Metric(
        "kvconnect_route_answers_total",
        "What servers behind `kvconnect route` were asked, by role and outcome: ok, busy, failed, "
        "late; all but the first go to another one.",
        totals(each("route.{}.{}", _ROLES, ("ok", "busy", "failed", "late"))),
        ("role", "outcome"),
    ),
    Metric(
        "kvconnect_route_prompt_pieces_total",
        "Pieces of 256 characters or 64 tokens of the prompts that a server was chosen for.",
        totals(each("route.{}.chosen.pieces", _ROLES)),
        ("role",),
    ),
    Metric(
        "kvconnect_route_held_pieces_total",
        "Those of them that it had computed before.",
        totals(each("route.{}.chosen.held_pieces", _ROLES)),
        ("role",),
    ),
    Metric(
        "kvconnect_route_computed_by_decode_total",
        "Prompts that no prefill server was left for.",
        totals({(): "route.computed_by_decode"}),
    ),
    Metric(
        "kvconnect_route_servers",
        "Servers by role: up, or down.",
        sizes(each("route.{}.{}", _ROLES, ("up", "down"))),
        ("role", "state"),
    ),
    Metric(
        "kvconnect_route_running_requests",
        "Requests under way on servers, by role.",
        sizes(each("route.{}.running", _ROLES)),
        ("role",),
    ),
    Metric(
        "kvconnect_prompt_tokens_total",
        "Tokens of their prompts, by outcome: reused, new, or the reason why they were computed "
        "although they might have been reused; unexplained: of engines that count no outcomes.",
        outcomes,
        ("outcome",),
    ),
    Metric(
        "kvconnect_ceiling_tokens_total",
        "Prompt tokens that a cache without limits would have brought, in whole blocks; an "
        "estimate, with a standard error of 1.3 % of the distinct blocks.",
        totals({(): "engine.request.ceiling_tokens"}),
    ),
    Metric(
        "kvconnect_hit_tokens_total",
        "Prompt tokens that were not computed, by where their KV came from: device, host or store.",
        totals(each("engine.request.{}_tokens", ("device", "host", "store"))),
        ("tier",),
    ),
    Metric(
        "kvconnect_device_blocks",
        "KV blocks on the device: used by requests, or free (perhaps cached).",
        sizes(each("engine.blocks.{}", ("used", "free"))),
        ("state",),
    ),
    Metric(
        "kvconnect_host_blocks_total",
        "Blocks moved to the host tier (offload) and back (onboard).",
        totals(each("cache.{}.blocks", ("offload", "onboard"))),
        ("direction",),
    ),
    Metric(
        "kvconnect_late_lookups_total",
        "Admissions that did not wait longer for the store's answer.",
        totals({(): "connector.lookup.late"}),
    ),
    Metric(
        "kvconnect_load_decisions_total",
        "Prompts that a store had a part of, by how they got it: load, compute (the load was not "
        "started, or brought nothing in time), or both at once.",
        by_label("engine.load", "decision", [decision.value for decision in Decision]),
        ("decision",),
    ),
    Metric(
        "kvconnect_load_predicted_seconds_total",
        "Time that loads were predicted to take, or both at once; only of those with a prediction.",
        totals({(): "engine.load.predicted.seconds"}),
    ),
    Metric(
        "kvconnect_load_seconds_total",
        "Time that these took.",
        totals({(): "engine.load.predicted.took"}),
    ),
    Metric(
        "kvconnect_transfers_total",
        "Loads and saves of requests, by how they ended.",
        totals(
            each(
                "connector.{}.{}",
                ("load", "save"),
                ("completed", "failed", "cancelled", "timed_out"),
            )
        ),
        ("direction", "state"),
    ),
    Metric(
        "kvconnect_unsaved_blocks_total",
        "Blocks that were not saved: no room to stage them (dropped), or the store failed (lost).",
        totals(each("connector.save.{}.blocks", ("dropped", "lost"))),
        ("reason",),
    ),
    Metric(
        "kvconnect_hook_failures_total",
        "Failures of hooks of a connector that extends the built-in one, by the hook; each cost a "
        "load or a save.",
        by_label("connector.hook.failed", "hook", _HOOKS),
        ("hook",),
    ),
    Metric(
        "kvconnect_staging_bytes",
        "Host memory for blocks on their way: taken by loads, by saves, or free.",
        sizes(each("connector.staging.{}", ("load", "save", "free"))),
        ("use",),
    ),
    Metric(
        "kvconnect_store_calls_total",
        "Calls to a store, whatever came of them; refused ones too.",
        of_calls(each("store.{}", _OPERATIONS)),
        _CALL,
    ),
    Metric(
        "kvconnect_store_seconds_total",
        "Time that they took.",
        of_calls(each("store.{}.seconds", _OPERATIONS)),
        _CALL,
    ),
    Metric(
        "kvconnect_store_call_seconds",
        "Time that each of them took.",
        of_each_call("seconds", _OPERATIONS),
        _CALL,
        TIMES,
    ),
    Metric(
        "kvconnect_store_call_bytes",
        "Bytes of the blocks that a call loaded or saved, before codecs; of calls that moved any.",
        of_each_call("bytes", ("load", "save")),
        _CALL,
        SIZES,
    ),
    Metric(
        "kvconnect_store_blocks_total",
        "Blocks that were loaded and found sound, or saved.",
        of_calls({("load",): "store.load.loaded", ("save",): "store.save.saved"}),
        _CALL,
    ),
    Metric(
        "kvconnect_store_bytes_total",
        "Bytes of these blocks, before codecs.",
        of_calls({("load",): "store.load.bytes", ("save",): "store.save.bytes"}),
        _CALL,
    ),
    Metric(
        "kvconnect_store_misses_total",
        "Lookups that did not find all they asked for. No failure.",
        of_stores({(): "store.lookup.misses"}),
        _STORE,
    ),
    Metric(
        "kvconnect_store_failures_total",
        "What went wrong: failure (the store's error), timeout, refused (by the open breaker), "
        "bad_frame (damaged, dropped), other_codec (sound, of no use here).",
        of_stores(each("store.{}", _FAILURES)),
        (*_STORE, "kind"),
    ),
    Metric(
        "kvconnect_store_breaker_state",
        "0: closed, the store is used; 1: half-open, it is probed; 2: open, it is left alone.",
        store_sizes("store.breaker_state"),
        _STORE,
    ),
    Metric(
        "kvconnect_store_breaker_openings_total",
        "How often the breaker opened.",
        of_stores({(): "store.breaker.opened"}),
        _STORE,
    ),
    Metric(
        "kvconnect_store_calls_in_flight",
        "Calls that have not ended: in_time, or abandoned at their deadline.",
        calls_in_flight,
        (*_STORE, "state"),
    ),
    Metric(
        "kvconnect_store_used_bytes",
        "Bytes that blocks take in a store that knows.",
        store_sizes("store.bytes"),
        _STORE,
    ),
    Metric(
        "kvconnect_store_capacity_bytes",
        "Bytes that they may take.",
        store_sizes("store.capacity"),
        _STORE,
    ),
    Metric(
        "kvconnect_transfer_tokens_total",
        "Prompt tokens that were to come from another engine: fetched, or computed_instead.",
        totals(each("transfer.{}.tokens", ("fetched", "computed_instead"))),
        ("outcome",),
    ),
    Metric(
        "kvconnect_transfer_pulls_total",
        "Reads from peers' memory that ended, failed ones too.",
        totals({(): "transfer.pull"}),
    ),
    Metric(
        "kvconnect_transfer_pull_seconds_total",
        "Time that they took.",
        totals({(): "transfer.pull.seconds"}),
    ),
    Metric(
        "kvconnect_transfer_bytes_total",
        "Bytes of those that succeeded.",
        totals({(): "transfer.pull.bytes"}),
    ),
    Metric(
        "kvconnect_transfer_pull_failures_total",
        "Those that failed: peer (it died, was disconnected or broke the protocol), corrupt (other "
        "bytes came than those that it sent), refused (no such memory), deadline, abandoned, "
        "closed (by this side, for all).",
        totals(each("transfer.pull.{}", _PULL_FAILURES)),
        ("reason",),
    ),
    Metric(
        "kvconnect_transfer_late_reads_total",
        "Prompts that were read when their lease was over, so discarded.",
        totals({(): "transfer.late_reads"}),
    ),
    Metric(
        "kvconnect_transfer_leases_total",
        "Prompts offered, or for which there was no_room; claims granted, or claims_refused (too "
        "many waited); how leases ended: released, aborted or expired; and late_messages, which "
        "came by a connection that another has replaced.",
        totals(each("transfer.lease.{}", _LEASE_EVENTS)),
        ("event",),
    ),
    Metric(
        "kvconnect_transfer_leased_bytes",
        "Bytes of blocks that are kept for peers.",
        sizes({(): "transfer.leased_bytes"}),
    ),
    Metric(
        "kvconnect_transfer_quarantined_blocks",
        "Blocks that failed reads may still write to.",
        sizes({(): "transfer.quarantined_blocks"}),
    ),
    Metric(
        "kvconnect_transfer_rebuilds_total",
        "How often the transport was built anew because of too many of them.",
        totals({(): "transfer.rebuilds"}),
    ),
    Metric(
        "kvconnect_transfer_peers",
        "Connected engines: readers fetch from this one, from sources it fetches.",
        sizes(each("transfer.peers.{}", ("readers", "sources"))),
        ("role",),
    ),
    Metric(
        "kvconnect_transfer_control_faults_total",
        "Control connections that did not come about (refused, not_opened, not_connected), gave "
        "their place to another one (pushed_out), or ended by a fault (silent, bad_message, "
        "not_taken).",
        totals(each("transfer.control.{}", _CONTROL_FAULTS)),
        ("reason",),
    ),
    Metric(
        "kvconnect_transfer_damaged_total",
        "Messages of the control channel, requests and pieces of blocks over TCP, and digests that "
        "were not as the other side made them. Each ended its connection, or its load.",
        totals(_DAMAGED),
        ("what",),
    ),
    Metric(
        "kvconnect_transfer_errors_total",
        "Errors that no code is known to raise, by the thread that went on after them: nixl, fetch"
        ". Each is logged.",
        totals(each("transfer.{}.error", ("nixl", "fetch"))),
        ("thread",),
    ),
    Metric(
        "kvconnect_nixl_blocks_total",
        "Blocks of `nixl:` stores: granted to peers, fetched from them.",
        totals(each("store.nixl.{}.blocks", ("granted", "fetched"))),
        ("event",),
    ),
    Metric(
        "kvconnect_nixl_bytes_total",
        "Bytes that `nixl:` stores fetched from peers.",
        totals({(): "store.nixl.fetched.bytes"}),
    ),
    Metric(
        "kvconnect_nixl_faults_total",
        "What went wrong between `nixl:` stores: answers that were late, blocks of a bad_digest, "
        "peers that were avoided for a while, rebuilds of the transport.",
        totals(each("store.nixl.{}", ("late", "bad_digest", "avoided", "rebuilds"))),
        ("reason",),
    ),
    Metric(
        "kvconnect_kv_events_total",
        "Events of stored and removed blocks: published, or dropped before they were.",
        totals(each("events.{}.events", ("published", "dropped"))),
        ("event",),
    ),
)
"""All metrics, in the order of ``docs/reference/metrics.md``."""
