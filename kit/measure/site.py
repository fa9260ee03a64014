"""Measurements of `kit bench`: rates of matrix products, memory and collectives on this machine.
The planner needs them to predict step times.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.interpreter import module_command
from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.site import Fact, IntraNodeLink, Links, Site
from cluster.state import last_attempt, read_state
from cluster.submission import submit
from kit.errors import RunError
from kit.measure.device import torch_device
from kit.measure.gemm import is_settled, measure_peak, measured_site
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from kit.show.results import short_number

TRIAD_NUMBERS = 2**25
"""Number of fp32 elements in each of the three arrays a, b and c. Memory bandwidth is measured by
computing a = b + c. An array has 128 MiB, which is larger than any cache."""


def measure_site(site: Site, *, num_processes: int = 2) -> Site:
    """Measures the peak, the memory bandwidth and the links of this machine, and returns the local
    site with these numbers. The measurement needs about 20 s.

    Peak and memory bandwidth are the rates of one process while no other process of the measurement
    computes. If several processes share few cores, their rates are lower. A calibration on runs
    measures this loss.

    Raises:
        ConfigError: The site is not this machine.
    """
    if site.scheduler != "local":
        raise ConfigError(
            f"site.scheduler: {site.scheduler!r} is not this machine. Measure inside a job there: "
            "`python -m kit.measure.collectives --out FILE` as the command of each rank."
        )
    site = measured_site(site)
    rates = best_rates(by_ranks("kit.measure.collectives", num_processes))
    source = f"measured on this machine: gloo, {num_processes} processes"
    links = tuple(
        IntraNodeLink(num_devices=ranks, bytes_per_s=Fact(value=rate, source=source))
        for ranks, rate in sorted(rates.items())
    )
    bandwidth = Fact(
        value=memory_bytes_per_s(), source="measured on this machine: a = b + c on one thread"
    )
    return site.replace(
        device=site.device.replace(memory_bytes_per_s=bandwidth), links=Links(intra_node=links)
    )


def remeasure(run: Run) -> dict[str, tuple[Fact | None, Fact]]:
    """Measures the peak of this machine again for each dtype of a run, and writes the new peaks
    into the run's site.json. Returns a dict from dtype to (old peak, new peak). An unknown old peak
    is None.

    For each dtype an alert with the old and the new peak is added to the run.

    Raises:
        JobError: The run belongs to another user.
        ConfigError: The run was not trained on this machine.
        RunError: The machine is too busy to measure a higher peak than the old peak. Nothing was
            written. Or the measurement on the GPU failed.
    """
    run.check_writable("correct its site.json")
    if run.site.scheduler != "local":
        raise ConfigError(
            f"{run.directory}: its site {run.site.name!r} is not this machine, so its peak cannot"
            " be measured here. Correct device.peak_flops_per_s in its site.json from the data"
            " sheet, or its plan or recipe."
        )
    state = read_state(run.directory)
    if state and state.process and not state.process.is_here:
        raise ConfigError(
            f"{run.directory}: it was trained on {state.process.host}, which is not this machine."
            " Measure there, or give the peak by hand: device.peak_flops_per_s in its site.json."
        )
    site = run.site
    found = {}
    for dtype in sorted({plan.precision for plan in (run.plan, *run.plans().values())}):
        old = site.device.peak_flops_per_s.get(dtype)
        new = measure_peak(dtype, device=torch_device(site))
        if not is_settled(new) and old is not None and new.value <= old.value:
            raise RunError(
                f"{run.directory}: this machine is too busy to measure its {dtype} peak: rounds"
                f" differ by {new.error:.0%}, the best was {new.value / 1e9:.1f} GFLOP/s and its"
                f" site.json has {old.value / 1e9:.1f}. Nothing was changed; try again when less"
                f" runs (load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)."
            )
        site = site.with_measured_peak(dtype, new.value, new.source, new.error)
        found[dtype] = (old, new)
    site.write(run.directory / "site.json")
    _record_peaks(run, found)
    return found


def _record_peaks(run: Run, found: dict[str, tuple[Fact | None, Fact]]) -> None:
    """Adds one alert to the run for each peak that was measured again. The alert states the old and
    the new peak.
    """
    alerts = []
    for dtype, (old, new) in found.items():
        before = "unknown" if old is None else short_number(old.value / 1e12)
        now = short_number(new.value / 1e12)
        alert = Alert(
            message=f"the {dtype} peak was measured again, {now} TFLOP/s a device: it was {before}",
            kind="peak",
            level="warning",
            attempt=last_attempt(run.directory),
            step=run.metrics().summary()["step"],
            time=time.time(),
        )
        alerts.append(alert)
    AlertLog(run.directory / "alerts.jsonl").add(alerts)


def to_toml(site: Site) -> str:
    """Returns the text of a site file in TOML, with the devices and the measured numbers of a site.
    All other values are inherited from the site `laptop`.
    """

    def fact(name: str, value: Fact) -> str:
        error = "" if value.error is None else f", error = {value.error:.2g}"
        return (
            f"{name} = {{ value = {value.value:.6g}, source = {json.dumps(value.source)}{error} }}"
        )

    device = site.device
    lines = [
        'base = "laptop"',
        f"name = {json.dumps(site.name)}",
        f"devices_per_node = {site.devices_per_node}",
        "",
        "[device]",
        f"name = {json.dumps(device.name)}",
    ]
    if device.memory_bytes:
        lines.append(fact("memory_bytes", device.memory_bytes))
    if device.memory_bytes_per_s:
        lines.append(fact("memory_bytes_per_s", device.memory_bytes_per_s))
    lines += ["", "[device.peak_flops_per_s]"]
    for dtype, peak in device.peak_flops_per_s.items():
        lines.append(fact(dtype, peak))
    for link in site.links.intra_node:
        lines += ["", "[[links.intra_node]]", f"num_devices = {link.num_devices}"]
        lines.append(fact("bytes_per_s", link.bytes_per_s))
    return "\n".join(lines) + "\n"


def by_ranks(module: str, num_processes: int, limit_s: float = 300) -> Any:
    """Runs a measurement module, e.g. `kit.measure.collectives`, as `num_processes` ranks on this
    machine. Returns the parsed JSON that the module writes.

    Raises:
        RuntimeError: A rank failed, or the ranks needed more than `limit_s` seconds. The message
            ends with the last 2,000 characters of rank 0's log.
    """
    with tempfile.TemporaryDirectory(prefix="kit-bench-") as folder:
        out = Path(folder) / "measured.json"
        argv = module_command(module, "--out", str(out))
        asked = JobSpec(
            name=module,
            run_dir=f"{folder}/job",
            argv=argv,
            num_processes=num_processes,
            forks=True,
            time_limit_s=limit_s,
            grace_s=1.0,
            max_restarts=0,
        )
        job = submit(asked, Site.load("laptop"))
        status = job.wait()
        if status.state != "done":
            raise RuntimeError(f"{module}: {status.state}: {status.reason}\n{job.logs(0)[-2000:]}")
        return json.loads(out.read_text())


def best_rates(rows: list[dict]) -> dict[int, float]:
    """Returns a dict from number of ranks to the highest bus bandwidth in bytes/s over all message
    sizes. `rows` is the result of `collectives.measure`.
    """
    slowest_first = sorted(rows, key=lambda row: row["bus_bytes_per_s"])
    return {row["ranks"]: row["bus_bytes_per_s"] for row in slowest_first}


def memory_bytes_per_s() -> float:
    """Measures and returns the memory bandwidth of one thread in bytes/s. It is the highest rate of
    a = b + c over fp32 arrays that are larger than any cache. Each element counts 12 bytes: two
    reads and one write of 4 bytes.
    """
    import torch

    from kit.measure.timing import best_within

    a, b, c = (torch.ones(TRIAD_NUMBERS) for _ in range(3))
    return 12 * TRIAD_NUMBERS / best_within(1.0, lambda: torch.add(b, c, out=a))
