"""Slow network links and CPU cores of simulated nodes, made by limits of the Linux kernel. Needs
root.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.sandbox import Sandbox
from cluster.site import Fact, Links, Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.fit.own_runs import kept_runs
from kit.monitor.speed import compare_speed_with_prediction
from kit.run import Run

SPEC = ModelSpec.llama(
    name="wide",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    ffn_hidden_size=1024,
    vocab_size=300,
    sequence_length=128,
)
PLAN = Plan(data_parallel=2, zero_stage=1, micro_batch_size=2, global_batch_size=4)
"""Plan of the slowed runs. A step has enough work to show a slow core, and sends 13 MB of
gradients, enough to show a slow link.
"""
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000


@contextlib.contextmanager
def slow_links(sandbox: Sandbox, nodes: list[str], megabits_per_s: int) -> Iterator[None]:
    """Limits the outgoing bandwidth of each node by a token bucket (tc-tbf) until the
    context ends.
    """
    if not sandbox.isolated:
        pytest.skip("the nodes have no network of their own: that needs root")
    at = [["tc", "-n", f"{sandbox.tag}-{node}", "qdisc"] for node in nodes]
    rate = ["rate", f"{megabits_per_s}mbit", "burst", "64kb", "latency", "300ms"]
    for words in at:
        subprocess.run([*words, "add", "dev", "eth0", "root", "tbf", *rate], check=True)
    try:
        yield
    finally:
        for words in at:
            subprocess.run([*words, "del", "dev", "eth0", "root"], check=True)


@contextlib.contextmanager
def slow_core(name: str, pids: list[int], share: float) -> Iterator[None]:
    """Limits each process to a share of one core (cgroup v1: cpu.cfs_quota_us) until the context
    ends.
    """
    if not (CPU / "cpu.cfs_quota_us").exists() and not (CPU / "cgroup.procs").exists():
        pytest.skip("there is no cgroup v1 for CPU time here")
    groups = [CPU / f"kit-{name}-{pid}" for pid in pids]
    for group, pid in zip(groups, pids, strict=True):
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"{group} cannot be made: {error}")
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))
        (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for group in groups:
            with contextlib.suppress(OSError):  # The process may have ended.
                for pid in (group / "cgroup.procs").read_text().split():
                    (CPU / "cgroup.procs").write_text(pid)
                group.rmdir()


def as_it_runs(run: Run) -> Site:
    """Returns the run's site with rates that were fitted to the measured step time of the run, and
    with the run as an own run, as `kit calibrate RUN --out` keeps it. Without an own run, the
    interval of the prediction is too wide for a verdict.

    The rate of matrix products is fitted to the time in which rank 0 did not wait. The network
    bandwidth is fitted to the waits of rank 0. The peak is the rate that the node check measured.
    On a busy machine, training steps stay far below this peak.
    """
    nodes = json.loads((run.directory / "node_check.json").read_text())["nodes"]
    steps, measured = run.metrics(), max(node["matmul_flops_per_s"] for node in nodes)
    waits_s, passes_s = (
        float(np.median(values[5:]))
        for values in (steps["waiting_s"], steps["forward_backward_s"] - steps["waiting_s"])
    )

    def at(rate: float, network: float) -> Site:
        peak, rate_now = (Fact(value=value, source="a run here") for value in (measured, rate))
        device = run.site.device.replace(
            memory_bytes=Fact(value=4e9, source="test"),
            memory_bytes_per_s=Fact(value=1e10, source="test"),
            peak_flops_per_s={"fp32": peak, "bf16": peak},
            matmul_flops_per_s={"fp32": rate_now, "bf16": rate_now},
        )
        links = Links(inter_node_bytes_per_s=Fact(value=network, source="fitted to a run"))
        return run.site.replace(device=device, links=links)

    def seconds(site: Site, *names: str) -> float:
        asked = Run(run.directory, spec=run.spec, plan=run.plan, recipe=run.recipe, site=site)
        terms = compare_speed_with_prediction(asked, 0).terms_s
        return sum(terms[name] for name in names)

    # The peak is the first guess, since no rate above it is accepted.
    passes_at_peak_s = seconds(at(measured, 1e9), "gemm", "attention", "embedding_logits")
    rate = measured * passes_at_peak_s / passes_s
    low, high = 1e6, 1e10
    for _ in range(14):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high)
            if seconds(at(rate, middle), "data_parallel") > waits_s
            else (low, middle)
        )
    return at(rate, high).replace(own_runs=tuple(kept_runs([run.directory])))
