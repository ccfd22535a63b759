"""What Prometheus is told: the same names everywhere, and numbers that mean what they say."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvconnect import trace as trace_module
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import ConfigurationError, MissingExtra
from kvconnect.overlap import Decision
from kvconnect.prometheus import METRICS, Collector, serve, snapshot
from kvconnect.prometheus.table import _STATUSES
from kvconnect.trace import BOUNDS, Event, Metrics, count, trace

ROOT = Path(__file__).parents[2]
DISK = (("store", "DiskBackend"), ("place", "disk:///kv"))
REDIS = (("store", "RedisBackend"), ("place", "redis://host"))


@pytest.fixture
def metrics(monkeypatch) -> Metrics:
    fresh = Metrics()
    monkeypatch.setattr(trace_module, "metrics", fresh)
    monkeypatch.setattr(snapshot, "metrics", fresh)
    return fresh


def value(name, **labels):
    registry = CollectorRegistry()
    registry.register(Collector())
    return registry.get_sample_value(name, {"engine": "kvconnect", **labels})


def names(text):
    return {base(one) for one in re.findall(r"kvconnect_[a-z_]+", text)}


def base(series):
    """The metric of a series: a histogram has several."""
    return re.sub(r"_(bucket|sum|count)$", "", series)


def labels_of():
    """The labels of every series, by its metric."""
    return {
        one.name: {"instance", "engine", *one.labels, *(["le"] if one.bounds else [])}
        for one in METRICS
    }


# ------------------------------------------------------------------------------------- the names


def test_the_documented_table_is_what_is_exported():
    rows = re.findall(
        r"^\| `(kvconnect_\w+)` \| (\w+) \| ?(.*?) ?\| (.+) \|$",
        (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    documented = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in rows
    ]
    assert documented == [(one.name, one.kind, one.labels, one.help) for one in METRICS]


def test_the_dashboard_shows_every_metric_and_no_other():
    folder = ROOT / "examples/observability/grafana/dashboards"
    dashboard = json.loads((folder / "kvconnect.json").read_text(encoding="utf-8"))
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert names(" ".join(queries)) == {one.name for one in METRICS}
    variables = [one["query"]["query"] for one in dashboard["templating"]["list"]]
    assert names(" ".join(variables)) <= {one.name for one in METRICS}


def test_the_dashboard_uses_labels_that_its_metrics_have():
    folder = ROOT / "examples/observability/grafana/dashboards"
    dashboard = json.loads((folder / "kvconnect.json").read_text(encoding="utf-8"))
    labels = labels_of()
    seen = 0
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            used = re.findall(r"(kvconnect_[a-z_]+)\{([^}]*)\}", target["expr"])
            for name, matchers in used:
                assert set(re.findall(r"(\w+)=~?", matchers)) <= labels[base(name)], target["expr"]
                seen += 1
            grouped = {
                label
                for group in re.findall(r"by \(([\w, ]+)\)", target["expr"])
                for label in group.split(", ")
            }
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= grouped, target
            assert grouped <= set().union(*(labels[base(name)] for name, _ in used)), target
    assert seen > 20


def test_the_documented_ratios_divide_series_of_the_same_labels():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    labels = {one.name: one.labels for one in METRICS}
    lines = page.partition("```promql\n")[2].partition("```")[0].splitlines()
    ratios = [line.partition("#")[0].split(" / ") for line in lines if " / " in line]
    assert len(ratios) == 4
    for sides in ratios:
        left = {() if one.startswith("sum(") else labels[names(one).pop()] for one in sides}
        summed = {one.startswith("sum(") for one in sides}  # `instance` and `job` are gone then
        assert len(left) == len(summed) == 1, sides


# ------------------------------------------------------------------------------------- alerts

ALERTS = ROOT / "examples/observability/alerts.yaml"


def rules():
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def test_alerts_use_metrics_labels_and_values_that_there_are():
    labels = labels_of()
    for rule in rules():
        used = names(rule["expr"])
        assert used, rule
        assert used <= labels.keys(), rule
        for name, matchers in re.findall(r"(kvconnect_[a-z_]+)\{([^}]*)\}", rule["expr"]):
            for label, values in re.findall(r'(\w+)=~"([^"]+)"', matchers):
                assert label in labels[base(name)]
                assert set(values.split("|")) <= set(map(str, (*FAULTS, *_STATUSES))), rule
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        have = grouped or set.intersection(*(labels[name] for name in used))
        assert have <= set().union(*(labels[name] for name in used))
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert shown <= have, rule


def test_every_alert_is_documented_and_loaded():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(Kvconnect\w+)` \|", page, re.MULTILINE)
    assert documented == [rule["alert"] for rule in rules()]
    prometheus = yaml.safe_load((ALERTS.parent / "prometheus.yaml").read_text(encoding="utf-8"))
    assert prometheus["rule_files"] == [ALERTS.name]


def test_promtool_accepts_rules_and_configuration():
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not on PATH: the rules were not checked by Prometheus itself")
    for check in (("rules", ALERTS), ("config", ALERTS.parent / "prometheus.yaml")):
        done = subprocess.run([tool, "check", *check], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------- the numbers


REQUEST = {"prompt_tokens": 100, "device_tokens": 10, "host_tokens": 20, "store_tokens": 5}
LOAD = {"seconds": 3, "took": 4}
FAULTS = ("failure", "timeout", "refused", "bad_frame", "other_codec")
PULLS = ("peer", "corrupt", "refused", "deadline", "abandoned", "closed")
LEASES = (
    *("offered", "no_room", "granted", "claims_refused", "released", "aborted", "expired"),
    "late_messages",
)


@pytest.mark.parametrize(
    ("event", "numbers", "sample", "labels", "expected"),
    [
        ("engine.request", REQUEST, "requests_total", {}, 1),
        ("engine.request", REQUEST, "prompt_tokens_total", {"outcome": "unexplained"}, 100),
        ("engine.request", REQUEST, "hit_tokens_total", {"tier": "device"}, 10),
        ("engine.request", REQUEST, "hit_tokens_total", {"tier": "host"}, 20),
        ("engine.request", REQUEST, "hit_tokens_total", {"tier": "store"}, 5),
        ("engine.load.predicted", LOAD, "load_predicted_seconds_total", {}, 3),
        ("engine.load.predicted", LOAD, "load_seconds_total", {}, 4),
        ("store.nixl.granted", {"blocks": 3}, "nixl_blocks_total", {"event": "granted"}, 3),
        ("store.nixl.fetched", {"blocks": 2}, "nixl_blocks_total", {"event": "fetched"}, 2),
        ("store.nixl.fetched", {"bytes": 100}, "nixl_bytes_total", {}, 100),
        *(
            (f"store.nixl.{one}", {}, "nixl_faults_total", {"reason": one}, 1)
            for one in ("late", "bad_digest", "avoided", "rebuilds")
        ),
        *((f"store.{one}", {}, "store_failures_total", {"kind": one}, 1) for one in FAULTS),
        ("store.lookup", {"misses": 2}, "store_misses_total", {}, 2),
        *(
            (f"transfer.pull.{one}", {}, "transfer_pull_failures_total", {"reason": one}, 1)
            for one in PULLS
        ),
        *(
            (f"transfer.lease.{one}", {"nbytes": 9}, "transfer_leases_total", {"event": one}, 1)
            for one in LEASES
        ),
        *(
            (f"transfer.{one}", {"tokens": 30}, "transfer_tokens_total", {"outcome": one}, 30)
            for one in ("fetched", "computed_instead")
        ),
        ("transfer.nixl.error", {}, "transfer_errors_total", {"thread": "nixl"}, 1),
        ("transfer.late_reads", {}, "transfer_late_reads_total", {}, 1),
        ("transfer.rebuilds", {}, "transfer_rebuilds_total", {}, 1),
        ("transfer.control.silent", {}, "transfer_control_faults_total", {"reason": "silent"}, 1),
        ("transfer.control.damaged", {}, "transfer_damaged_total", {"what": "messages"}, 1),
        ("transfer.bad_digests", {}, "transfer_damaged_total", {"what": "digests"}, 1),
        ("transfer.pull.corrupt", {}, "transfer_damaged_total", {"what": "pieces"}, 1),
    ],
)
def test_what_is_counted_is_told(metrics: Metrics, event, numbers, sample, labels, expected):
    own = DISK if sample.startswith("store_") else ()
    for _ in range(2):
        count(event, own, **numbers)
    others = {  # samples of the same name that another event raises
        tuple(found.labels.items())
        for family in Collector().collect()
        for found in family.samples
        if found.name == f"kvconnect_{sample}" and found.value
    }
    assert value(f"kvconnect_{sample}", **dict(own), **labels) == 2 * expected
    assert len(others) == (3 if sample == "hit_tokens_total" else 1)


def test_all_is_told_with_the_engine_whose_process_it_is(metrics: Metrics):
    metrics.engine = "vllm"
    count("engine.request")
    assert value("kvconnect_requests_total", engine="vllm") == 1
    assert value("kvconnect_requests_total") is None


def test_uncached_requests_are_counted_by_reason(metrics: Metrics):
    note_doubt(Doubt.WEIGHTS_CHANGED, "a detail")
    note_doubt(Doubt.WEIGHTS_CHANGED, "another")
    reasons = {one: value("kvconnect_uncached_requests_total", reason=one.value) for one in Doubt}
    assert {one: total for one, total in reasons.items() if total} == {Doubt.WEIGHTS_CHANGED: 2}


def test_loads_are_counted_by_decision(metrics: Metrics):
    for decision in ("load", "compute", "both", "load"):
        count("engine.load", labels=(("decision", decision),))
    told = {one: value("kvconnect_load_decisions_total", decision=one) for one in Decision}
    assert told == {"load": 2, "compute": 1, "both": 1}


def test_calls_bytes_and_seconds_are_told_by_store_and_operation(metrics: Metrics):
    for labels, nbytes in ((DISK, 4096), (REDIS, 10)):
        with trace("store.load", labels, blocks=3) as span:
            span.set(loaded=2, bytes=nbytes)
    with trace("store.save", DISK, blocks=3) as span:
        span.set(saved=3, bytes=7)
    load = dict(DISK, operation="load")
    assert value("kvconnect_store_calls_total", **load) == 1
    assert value("kvconnect_store_bytes_total", **load) == 4096
    assert value("kvconnect_store_blocks_total", **load) == 2
    assert value("kvconnect_store_seconds_total", **load) > 0
    assert value("kvconnect_store_bytes_total", **dict(REDIS), operation="load") == 10
    assert value("kvconnect_store_blocks_total", **dict(DISK), operation="save") == 3


def test_sizes_and_breakers_are_told_by_store_and_place(metrics: Metrics):
    other = (("store", "DiskBackend"), ("place", "disk:///other"))
    for labels, state, nbytes in ((DISK, 2, 50), (other, 1, 1)):
        sizes = {
            "store.breaker_state": float(state),
            "store.bytes": float(nbytes),
            "store.capacity": 1000.0,
            "store.running": 3.0,
            "store.abandoned": 1.0,
        }
        metrics.add_gauges(lambda sizes=sizes: sizes, labels)
    store = dict(DISK)
    assert value("kvconnect_store_breaker_state", **store) == 2
    assert value("kvconnect_store_breaker_state", **dict(other)) == 1
    assert value("kvconnect_store_used_bytes", **store) == 50
    assert value("kvconnect_store_used_bytes", **dict(other)) == 1
    assert value("kvconnect_store_capacity_bytes", **store) == 1000
    assert value("kvconnect_store_calls_in_flight", **store, state="in_time") == 2
    assert value("kvconnect_store_calls_in_flight", **store, state="abandoned") == 1


def test_two_engines_are_one_process(metrics: Metrics):
    for used in (3.0, 4.0):
        metrics.add_gauges(
            lambda used=used: {"engine.blocks.used": used, "engine.blocks.free": 1.0}
        )
    assert value("kvconnect_device_blocks", state="used") == 7
    assert value("kvconnect_device_blocks", state="free") == 2


def test_pulls_and_peers_are_told(metrics: Metrics):
    with trace("transfer.pull") as span:
        span.set(bytes=4096)
    sizes = {"peers.readers": 3.0, "peers.sources": 2.0, "leased_bytes": 9.0}
    for quarantined in (1.0, 4.0):
        metrics.add_gauges(lambda size=quarantined: {"transfer.quarantined_blocks": size})
    metrics.add_gauges(lambda: {f"transfer.{name}": size for name, size in sizes.items()})

    def told(name: str, **labels: str) -> float | None:
        return value(f"kvconnect_transfer_{name}", **labels)

    assert (told("pulls_total"), told("bytes_total")) == (1, 4096)
    assert told("pull_seconds_total") > 0
    assert (told("peers", role="readers"), told("peers", role="sources")) == (3, 2)
    assert (told("quarantined_blocks"), told("leased_bytes")) == (5, 9)


# ------------------------------------------------------------------------------------- histograms


def test_a_histogram_has_every_number_in_its_bucket_and_their_sum(metrics: Metrics):
    load, store = ("store.load", DISK), dict(DISK, operation="load")
    for nbytes in (1, 4096, 4097, 5 << 30):
        count(*load, bytes=nbytes)
    count(*load, bytes=0)  # nothing was moved
    name = "kvconnect_store_call_bytes"
    found = {bound: value(f"{name}_bucket", **store, le=bound) for bound in ("4096", "16384")}
    assert found == {"4096": 2, "16384": 3}
    assert value(f"{name}_bucket", **store, le="1.07374e+09") is None, "bounds are exact"
    assert value(f"{name}_bucket", **store, le="1073741824") == 3
    assert value(f"{name}_bucket", **store, le="+Inf") == 4
    assert value(f"{name}_count", **store) == 4
    assert value(f"{name}_sum", **store) == 1 + 4096 + 4097 + (5 << 30)
    assert value(f"{name}_count", **dict(store, operation="save")) is None


def test_the_bounds_shown_are_those_that_are_counted_by(metrics: Metrics):
    for event, numbers in BOUNDS.items():
        metrics.emit(Event(event, 0.3, dict.fromkeys(numbers, 70_000.0), labels=DISK))
    shown = {}
    for family in Collector().collect():
        if family.type == "histogram":
            shown[family.name] = {
                float(one.labels["le"]) for one in family.samples if "le" in one.labels
            }
    for one in METRICS:
        if one.bounds:
            assert shown.pop(one.name) == {*one.bounds, float("inf")}
    assert not shown


def test_a_call_that_fails_took_its_time_too(metrics: Metrics):
    with pytest.raises(OSError, match="planted"), trace("store.save", REDIS):
        raise OSError("planted")
    store = dict(REDIS, operation="save")
    assert value("kvconnect_store_call_seconds_count", **store) == 1
    assert value("kvconnect_store_call_seconds_sum", **store) > 0


@pytest.mark.parametrize("event", ["first_token", "between_tokens"])
def test_times_of_tokens_are_told_by_model(metrics: Metrics, event):
    for model, seconds in (("a", 0.2), ("a", 0.3), ("b", 7.0)):
        metrics.emit(Event(f"server.{event}", seconds, labels=(("model", model),)))
    name = f"kvconnect_{event}_seconds"
    assert value(f"{name}_bucket", model="a", le="0.25") == 1
    assert value(f"{name}_sum", model="a") == 0.5
    assert value(f"{name}_count", model="b") == 1


# ------------------------------------------------------------------------------------- serving


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_a_scrape_gets_every_metric_with_its_type(metrics: Metrics):
    count("engine.request", prompt_tokens=3)
    with serve(0, "127.0.0.1") as server:
        text = scrape(server.port)
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert set(families) == {one.name.removesuffix("_total") for one in METRICS}
    for one in METRICS:
        family = families[one.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (one.kind, one.help)
    assert "python_info" not in text  # nothing but ours


def test_a_port_that_is_taken_is_named():
    with serve(0, "127.0.0.1") as server:
        with pytest.raises(ConfigurationError, match=f"metrics port {server.port}: cannot"):
            serve(server.port, "127.0.0.1")
        port = server.port
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_it_listens_on_this_machine_only_unless_told_otherwise():
    with serve(0) as server, serve(0, "0.0.0.0") as everywhere:
        assert scrape(everywhere.port)
        with pytest.raises(OSError, match="refused"):  # an address of its own on this machine
            socket.create_connection(("127.0.0.2", server.port), timeout=60)
        socket.create_connection(("127.0.0.2", everywhere.port), timeout=60).close()


def test_an_impossible_port_is_named():
    with pytest.raises(ConfigurationError, match="metrics port 99999"):
        serve(99999)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[metrics\]'"):
        serve(0)
