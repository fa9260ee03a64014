"""Conversion of measured runs to the arrays `Rows` that a fit needs. The runs are published runs or
run directories of the kit. This module does not import torch.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cluster.record import ConfigError
from cluster.site import OwnRun, Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.fit import published
from kit.estimate.fit.fitting import Rows
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import NARROW, Hardware
from kit.estimate.theory.layouts import Layouts

if TYPE_CHECKING:
    from kit.run import Run

AnyRun: TypeAlias = "PublishedRun | OwnRun | Run | str | os.PathLike[str]"
"""A published run, or a run of the kit. A run of the kit is a `Run`, the path of its run directory,
or an attempt that a site file keeps (`OwnRun`)."""
WARM_UP = 2
"""Number of warm-up steps at the start of each attempt. Their times are ignored."""
CORE = dict(peak=1e11, memory_bytes_per_s=1e10, link_bytes_per_s=5e9)
"""Peak in FLOP/s, and memory and link bandwidths in bytes/s, of one CPU core. Only their orders of
magnitude are right. These numbers are assumed for a local site that `kit bench` has not
measured."""


def rows_of_any(runs: Sequence[AnyRun], site: Site | None, hardware: Hardware | None) -> Rows:
    """Returns measured runs as arrays for a fit. They may be published runs and run directories of
    the kit. At least one run is required. A run of the kit has one row per attempt.

    If `site` is None, the site of each run is used. If `hardware` is None, the numbers of the site
    are used.

    Raises:
        ConfigError: A directory has no attempt with more than WARM_UP steps, `site` has another
            device than a run, or the site lacks a number that step time needs.
    """
    parts = [_rows(run, site, hardware) for run in runs]
    sizes = list(map(len, parts))
    return Rows(
        layouts=Layouts.joined([part.layouts for part in parts], sizes),
        hardware=Hardware.joined([part.hardware for part in parts], sizes),
        step_time_s=np.concatenate([part.step_time_s for part in parts]),
        stack=np.concatenate([part.stack for part in parts]),
    )


def published_rows(runs: Sequence[PublishedRun], site: Site | None = None) -> Rows:
    """Returns published runs as arrays for a fit, with the numbers of each run's machine
    (`hardware_of`).

    Raises:
        ConfigError: The machine of a run lacks a number that the step time needs.
    """
    stacks = sorted({run.stack for run in runs})
    return Rows(
        layouts=published.layouts(runs),
        hardware=Hardware.joined([hardware_of(run, site) for run in runs]),
        step_time_s=published.measured_step_seconds(runs),
        stack=np.array([stacks.index(run.stack) for run in runs]),
    )


def hardware_of(run: PublishedRun, site: Site | None = None) -> Hardware:
    """Returns peak rates, bandwidths and sizes of the machine of a published run. The numbers come
    from `site`, or from the run's own site if `site` is None. If the run has no site either, they
    are estimated in proportion to the peak of the device (`Hardware.like`).

    Raises:
        ConfigError: The site lacks a number. Or the run has no site, and the peak of its device is
            unknown or its products are in a format narrower than bf16.
    """
    is_narrow = run.precision in NARROW
    site = site or run.site()
    if site is not None:
        return Hardware.of(site, run.precision if is_narrow else "bf16")
    if run.peak_flops_per_s is None or is_narrow:
        raise ConfigError(
            f"run of {run.system} in {run.precision}: {run.device} has no site file"
            f"{', which would have the peak of that format' if is_narrow else ' and no peak'}."
            f" Name one that has{'.' if is_narrow else ', or fill peak_tflops_bf16.'}"
        )
    return Hardware.like(run.peak_flops_per_s)


def hardware_on(site: Site, layouts: Layouts, dtype: str = "bf16") -> Hardware:
    """Returns peak rates, bandwidths and sizes of a site for each layout. On a local site the
    numbers depend on the layout, since all processes of a layout share the cores.

    Products in fp16 are assumed to be as fast as products in bf16, as in the fit (`hardware_of`).
    Site files state the measured rate of products only for bf16. Without a measured rate for fp16,
    the usual share of the peak would be assumed, which is above the measured rate.

    If the peak, the memory bandwidth or the links of a local site were not measured by `kit bench`,
    the numbers of `CORE` are used.

    Raises:
        ConfigError: The site of a cluster lacks a number.
    """
    if site.scheduler != "local":
        return Hardware.of(site, "bf16" if dtype == "fp16" else dtype)
    peak = site.peak_flops_per_s(dtype) or site.peak_flops_per_s("fp32") or CORE["peak"]
    memory = site.device.memory_bytes_per_s
    tiers = site.links.intra_node
    share = np.minimum(1.0, site.devices_per_node / layouts.num_devices)
    link = (tiers[0].bytes_per_s.value if tiers else CORE["link_bytes_per_s"]) * share
    rate = (memory.value if memory else CORE["memory_bytes_per_s"]) * share
    most = float(np.max(layouts.num_devices))
    return Hardware(
        peak_flops_per_s=peak * share,
        attention_flops_per_s=peak * share,
        matmul_flops_per_s=peak * share,
        memory_bytes=site.device.memory_bytes.value if site.device.memory_bytes else float("nan"),
        memory_bytes_per_s=rate,
        near_devices=most,
        near_bytes_per_s=link,
        node_devices=most,
        node_bytes_per_s=link,
        full_devices=1.0,
        network_bytes_per_s=link * most,
        contention=1.0,
        price_per_device_hour=float("nan"),
    )


def site_of(runs: Sequence[AnyRun]) -> Site | None:
    """Returns the site of the first run. Returns None if there is no run, or if the first run is a
    published run, since each published run has its own site.
    """
    for run in runs:
        if isinstance(run, PublishedRun | OwnRun):
            return None
        return _opened(run).site
    return None


def _opened(run: "Run | str | os.PathLike[str]") -> "Run":
    # A search without runs of the kit does not wait for this import.
    from kit.run import Run

    return run if isinstance(run, Run) else Run.open(Path(run))


def _rows(run: AnyRun, site: Site | None, hardware: Hardware | None) -> Rows:
    if isinstance(run, PublishedRun):
        rows = published_rows([run], site)
        return rows if hardware is None else dataclasses.replace(rows, hardware=hardware)
    if isinstance(run, OwnRun):
        assert site is not None
        plan = Plan.from_dict(json.loads(run.plan))
        layouts = _kit_layouts(ModelSpec.from_dict(json.loads(run.spec)), plan)
        return Rows(
            layouts=layouts,
            hardware=Hardware.joined([hardware or hardware_on(site, layouts, plan.precision)]),
            step_time_s=np.array([run.step_time_s]),
            stack=np.zeros(1, int),
        )
    run = _opened(run)
    if site is not None and site.device.name != run.site.device.name:
        raise ConfigError(
            f"{run.directory}: it ran on {run.site.device.name!r} of {run.site.name}, and"
            f" {site.name} has {site.device.name!r}. Leave the site out, or give one with the"
            " device of the runs."
        )
    plans = run.plans()
    elsewhere = run.other_sites()
    times = []
    layouts = []
    machines = []
    for attempt, step_time_s in median_step_times(run).items():
        plan = plans[attempt]
        times.append(step_time_s)
        layouts.append(_kit_layouts(run.spec, plan))
        machines.append(
            hardware
            or hardware_on(site or elsewhere.get(attempt, run.site), layouts[-1], plan.precision)
        )
    return Rows(
        layouts=Layouts.joined(layouts),
        hardware=Hardware.joined(machines),
        step_time_s=np.array(times),
        stack=np.zeros(len(times), int),
    )


def median_step_times(run: "Run") -> dict[int, float]:
    """Returns the median seconds per step of each attempt of a run, without WARM_UP steps. Attempts
    with fewer steps are left out.

    Raises:
        ConfigError: No attempt has more than WARM_UP steps.
    """
    metrics = run.metrics()
    times = {}
    for attempt in run.plans():
        steps = metrics["step_time_s"][metrics["attempt"] == attempt][WARM_UP:]
        if len(steps):
            times[attempt] = float(np.median(steps))
    if not times:
        raise ConfigError(
            f"{run.directory}: no attempt has more than {WARM_UP} steps, so there is no step time"
            " yet."
        )
    return times


def _kit_layouts(spec: ModelSpec, plan: Plan) -> Layouts:
    """Returns one layout of a run of the kit, with the kernels of the kit."""
    return Layouts.of(spec, [plan], flash_attention=2, gradient_bytes=4.0)
