"""Computes the results that depend only on the packaged runs and site files, and writes them to the
file that `stored.py` reads. `make fits` calls `write`.
"""

import csv
import json
from typing import Any

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.fit import published
from kit.estimate.fit.calibrate import calibrate
from kit.estimate.fit.own_runs import extrapolations
from kit.estimate.fit.published import PublishedRun
from kit.estimate.fit.stored import FILE, hash_inputs
from kit.estimate.theory.hardware import NARROW

A100_PEAK = 312e12
"""Peak FLOP/s of an A100 in bf16. It is assumed for a published run whose source does not state the
peak of its device."""


def compute() -> dict[str, Any]:
    """Returns the results as plain values for JSON: the hash of the inputs, the calibration of each
    packaged site that has published runs, the errors of `extrapolations`, and the table of runs
    (`run_table`).
    """
    calibrations = {}
    for name in Site.names():
        own = published.of_site(name)
        if own:
            calibrations[name] = calibrate(own, Site.load(name)).to_dict()
    return {
        "inputs": hash_inputs(),
        "calibrations": calibrations,
        "extrapolations": extrapolations(),
        **run_table(),
    }


def run_table() -> dict[str, Any]:
    """Returns facts about all published runs with a step time. Its keys:

    - lines: number of each run's row in the CSV file of the kit (`published.run_on_line`)
    - sizes: sizes of each run (`sizes_of`)
    - highest_mfu: maps the name of a device to its highest published MFU, as fractions of the bf16
      peak, in 16 bits or more (`wide`) and in a narrower format (`narrow`)
    - highest_causal_mfu: the same for `causal_mfu`, which does not depend on the sequence length
    """
    lines = []
    sizes = []
    highest_mfu: dict[str, dict[str, float]] = {}
    highest_causal_mfu: dict[str, dict[str, float]] = {}
    with published.FILE.open(newline="", encoding="utf-8-sig") as stream:
        for line, row in enumerate(csv.DictReader(stream), start=2):
            run = published.run_of_row(row)
            if not isinstance(run, PublishedRun) or not run.step_time_s:
                continue
            lines.append(line)
            peak = run.peak_flops_per_s or A100_PEAK
            sizes.append(sizes_of(run.spec, run.plan, peak, run.precision))
            site = run.site()
            rate = run.flops_per_s()
            if site and rate and run.peak_flops_per_s:
                width = "narrow" if run.precision in NARROW else "wide"
                mfu = rate / run.peak_flops_per_s
                for highest, value in (
                    (highest_mfu, mfu),
                    (highest_causal_mfu, causal_mfu(mfu, run.spec)),
                ):
                    by_width = highest.setdefault(site.device.name, {})
                    by_width[width] = max(by_width.get(width, 0.0), value)
    return {
        "lines": lines,
        "sizes": sizes,
        "highest_mfu": highest_mfu,
        "highest_causal_mfu": highest_causal_mfu,
    }


def causal_mfu(mfu: float, spec: ModelSpec) -> float:
    """Returns an MFU without the FLOPs of the pairs of tokens that the causal mask excludes.

    The kit's MFU counts attention for all pairs of tokens (`FlopBasis.MODEL`). Fused attention
    computes half of them. The longer the sequence, the more FLOPs the MFU counts that no device
    executes. MFUs of runs with different sequence lengths are therefore compared without them.
    In layers with an attention window, half of the pairs in the window are left out too.
    """
    counted = spec.flops_per_token()
    masked = 6 * spec.attention_size * spec.attended_tokens
    return mfu * (1 - masked / counted)


def sizes_of(
    spec: ModelSpec, plan: Plan, peak_flops_per_s: float, precision: str
) -> tuple[float, ...]:
    """Returns the sizes by which a run is compared with a layout: parameters, devices, tensor and
    pipeline degree, sequence length, micro-batch size and peak FLOP/s of a device.

    For a precision narrower than bf16, the bf16 peak is multiplied by the largest speedup of this
    precision over bf16.
    """
    return (
        spec.num_params,
        plan.num_devices,
        plan.tensor_parallel,
        plan.pipeline_parallel,
        spec.sequence_length,
        plan.micro_batch_size,
        peak_flops_per_s * published.SPEEDUP.get(precision, 1),
    )


def write() -> None:
    """Fits again and writes the results to FILE. It is called by `make fits`."""
    FILE.write_text(json.dumps(compute(), separators=(",", ":")) + "\n")
