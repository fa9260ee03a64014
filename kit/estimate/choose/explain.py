"""Explanations of a search: what limits a layout, what would change the choice, and how far it
is from measurements.
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

import numpy as np

from cluster.record import html_table
from kit.config.plan import Plan
from kit.errors import ConfigError
from kit.estimate.choose.nearest import Nearest, measured_mfu, nearest_run
from kit.estimate.choose.search import Search, describe, interval, seconds
from kit.estimate.theory.schedule import simulate_plan

SHORTLIST = 2000
"""Fastest layouts that are looked at again on a changed machine."""
WITHIN_REACH = 1.5
"""Of the device's memory: what needs more is not called limited by memory, since nothing small
would help."""
FAR = 4.0
"""Distance to the nearest published run from which on a prediction is called outside the
measured range."""
PCIE_BYTES_PER_S = 64e9
"""In each direction, by 16 lanes of PCIe 5 (PCI-SIG), as H100, H200, B200 and MI300X have. States
that wait in the host's memory come and go in each step, both at once at best."""
ROUNDING = 1e-6
"""Least relative difference of two step times that are not equal but for rounding."""
SIMULATED_ROUNDS = 6
"""Micro-batches simulated, in units of the pipeline's depth; a longer steady state only repeats
the slowest stage."""
CHANGES = {
    "a network between nodes half as fast": {"network_bytes_per_s": 0.5},
    "links inside a node half as fast": {"near_bytes_per_s": 0.5, "node_bytes_per_s": 0.5},
    "matrix products a quarter slower": {
        "matmul_flops_per_s": 0.75,
        "attention_flops_per_s": 0.75,
        "peak_flops_per_s": 0.75,
    },
    "a quarter more memory": {"memory_bytes": 1.25},
    "a quarter less memory": {"memory_bytes": 0.75},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One layout of a search with everything that is known about it."""

    search: Search
    index: int
    tokens: float | None = None
    """Budget for days and price."""

    @cached_property
    def plan(self) -> Plan:
        """As the engines take it."""
        return self.search.plan(self.index)

    @cached_property
    def row(self) -> dict[str, Any]:
        """The plan's fields, step time, bytes, risk, MFU, and with a token budget days and
        price.
        """
        row = self.search.row(self.index) | {
            "tokens_per_s": float(self._time.tokens_per_s[0]),
            "hfu": self._hfu,
        }
        if self.tokens is not None:
            price = float(self._time.price(self.tokens)[0])
            row |= {
                "days": float(self._time.days(self.tokens)[0]),
                "price_usd": None if math.isnan(price) else price,
            }
        return row

    @cached_property
    def time_terms_s(self) -> dict[str, float]:
        """Seconds of the step by term, largest first; they add up to the step time."""
        terms = {
            name: float(np.broadcast_to(value, (1,))[0])
            for name, value in self._time.terms_s.items()
        }
        return dict(sorted(terms.items(), key=lambda item: -item[1]))

    @cached_property
    def memory_terms_bytes(self) -> dict[str, float]:
        """Bytes of the heaviest device by term, reserve included."""
        terms = self.search.machine.memory(self._layout).terms()
        return {name: float(value[0]) for name, value in terms.items()}

    @cached_property
    def simulated_share(self) -> float:
        """Ratio of the step time with the pipeline's schedule simulated event by event to the step
        time in closed form.

        The ratio checks the closed form. It gives no second step time: the simulation takes the
        closed form's stage times but no delays of single ranks, so it is shorter by 0 to 10 % on
        published runs. A ratio above 1 means that the closed form is too short for the schedule.
        """
        plan = self.plan
        terms = self.time_terms_s
        outside = sum(terms[name] for name in ("data_parallel", "optimizer", "overhead"))
        m = plan.num_microbatches
        p = plan.pipeline_parallel
        times = self.search.machine.stage_times(self.search.spec, plan, terms)
        # Per stage and micro-batch.
        whole = times["forward_s"] + times["backward_input_s"] + times["backward_weight_s"]
        simulated = min(m, SIMULATED_ROUNDS * p)
        result = simulate_plan(plan, num_microbatches=simulated, **times)
        per_device = np.bincount(result.order.device_of_stage, weights=whole, minlength=p)
        makespan_s = result.makespan_s + (m - simulated) * float(per_device.max())
        return (makespan_s + outside) / sum(terms.values())

    @cached_property
    def binding(self) -> str:
        """What keeps the step from being faster: memory, or the largest loss of time."""
        search = self.search
        capacity = float(self.search.machine.hardware.memory_bytes)
        near = np.flatnonzero(~search.feasible & (search.used_bytes <= WITHIN_REACH * capacity))
        if len(near):
            fastest = int(near[np.argmin(search.step_time_s[near])])
            gain = 1 - search.step_time_s[fastest] / search.step_time_s[self.index]
            if gain > 0.01:
                return (
                    f"memory: {describe(search.row(fastest))} would be {gain:.0%} faster, but uses "
                    f"{search.used_bytes[fastest] / 2**30:.0f} GiB of {capacity / 2**30:.0f} GiB"
                )
        total = sum(self.time_terms_s.values())
        useful = sum(self.time_terms_s[name] for name in ("gemm", "attention"))
        name, loss = next(
            item for item in self.time_terms_s.items() if item[0] not in ("gemm", "attention")
        )
        return (
            f"computation: {useful / total:.0%} of the step; most is lost to"
            f" {name.replace('_', ' ')}, {loss / total:.0%}"
        )

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """What would change the choice: other machines on which another layout wins, and the
        runner-up here.
        """
        texts = [_changed(self, name, factors) for name, factors in CHANGES.items()]
        return tuple(text for text in (*texts, _runner_up(self)) if text)

    @cached_property
    def nearest(self) -> Nearest:
        """The published run most like this layout."""
        machine = self.search.machine
        return nearest_run(self.search.spec, self.plan, machine.hardware, machine.coefficients)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Where the prediction should not be trusted as it stands."""
        site = self.search.machine.site
        hardware = self.search.machine.hardware
        texts = []
        ceiling = site.device.matmul_flops_per_s.get("bf16")
        rate = self._hfu * float(hardware.peak_flops_per_s)
        if self.plan.untrained:
            texts.append(
                " and ".join(f"{name} {getattr(self.plan, name)}" for name in self.plan.untrained)
                + ": the kit plans this, it does not train it; `kit launch` refuses it."
            )
        if self.search.machine.code_base != "kit":
            texts.append(
                f"time and memory are those of {self.search.machine.code_base}'s kernels, which the"
                " kit's engines do not run."
            )
        if ceiling and rate > 0.9 * ceiling.value and not hardware.is_narrow:
            texts.append(
                f"{rate / 1e12:.0f} TFLOP/s per device is not believable: no matrix product was"
                f" seen above {ceiling.value / 1e12:.0f} ({ceiling.source}). Calibrate on a run of"
                " this machine."
            )
        best = measured_mfu(site.device.name, self.plan.precision)
        if best and self.row["mfu"] > best:
            texts.append(
                f"MFU {self.row['mfu']:.1%} is above the {best:.1%} that published runs on this"
                " device reach."
            )
        if self.simulated_share > 1 + ROUNDING:
            longer = f"{self.simulated_share - 1:.1%} longer than this step time"
            texts.append(
                f"simulated event by event, the schedule takes {longer}. Prefer a layout without"
                " this warning."
            )
        texts += self.search.prediction(self.index).warnings
        texts += self._wide_texts
        beyond = {
            int(self.search.layouts.tensor_parallel[other])
            for other in self.search.fastest(5)
            if other != self.index
            and "tensor parallelism across nodes" in self.search.prediction(int(other)).untried
        }
        texts += [
            f"TP{degree} among the fastest layouts leaves the node, and no measured run of this"
            " machine had as many tensor ranks. Trust those layouts last."
            for degree in sorted(beyond)
        ]
        if self.search.batch_limit:
            texts.append(self.search.batch_limit)
        measured_s = self.row["step_time_s"] / (1 + self.nearest.residual)
        if self.nearest.distance > FAR:
            texts.append("no published run is near: a prediction outside the measured range.")
        elif not self.row["step_time_low_s"] <= measured_s <= self.row["step_time_high_s"]:
            texts.append(
                "the nearest measured run is missed by more than the interval allows. Its machine"
                f" is predicted with the efficiencies of {site.name}: trust the interval only as"
                " far as these hold."
            )
        return tuple(texts)

    @cached_property
    def elsewhere(self) -> tuple[str, ...]:
        """What other code bases would gain and no engine of the kit does: context parallelism,
        overlap, offload.
        """
        both = {"data_overlap": np.array(True), "tensor_overlap": np.array(True)}
        beside = dataclasses.replace(self._layout, **both)
        states = self.memory_terms_bytes["optimizer"]
        kept = self.memory_terms_bytes["activations"]
        gain = float(self.search.machine.step_time(beside).total_s[0]) / self.row["step_time_s"] - 1
        return (
            "context parallelism (--set 'plan.context_parallel=[1, 2, 4, 8]')",
            f"overlap of collectives with computation ({gain:+.1%} time)",
            f"offload of optimizer states ({states / 2**30:.1f} GiB less a device; at PCIe 5's 64"
            f" GB/s they need at least {seconds(states / PCIE_BYTES_PER_S, 2)} s a step), or of"
            f" activations (at most {kept / 2**30:.1f} GiB)",
        )

    @cached_property
    def _layout(self):
        return self.search.layouts.select(np.array([self.index]))

    @cached_property
    def _time(self):
        return self.search.machine.step_time(self._layout)

    @property
    def _base(self) -> str:
        """What MFU and HFU are fractions of, where it is not the peak of the products."""
        precision = self.plan.precision
        device = self.search.machine.site.device
        if precision == "bf16":
            return ""
        peak = device.peak_flops_per_s[precision].value
        share = self.row["mfu"] * float(self.search.machine.hardware.peak_flops_per_s) / peak
        return f" of the peak in bf16 (MFU {share:.1%} of that in {precision})"

    @property
    def _wide_texts(self) -> list[str]:
        """Returns the warning that tensor groups span several nodes, if they do."""
        degree = self.plan.tensor_parallel
        near = int(self.search.machine.hardware.node_devices)
        if degree <= near:
            return []
        is_node = near == self.search.machine.site.devices_per_node
        place = f"the node of {near} devices" if is_node else f"the {near} devices on fast links"
        return [
            f"TP{degree} leaves {place}, which few published runs did. Trust this layout less than"
            f" one with at most TP{near}."
        ]

    @property
    def _hfu(self) -> float:
        spec = self.search.spec
        plan = self.plan
        flops = spec.hardware_flops_per_token(
            plan.recompute, whole=plan.recomputes_whole, layers=plan.recomputed_layers(spec)
        )
        return self.search.mfu(self.index) * flops / spec.flops_per_token()

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, for JSON."""
        return self.row | {
            "simulated_share": self.simulated_share,
            "time_terms_s": self.time_terms_s,
            "memory_terms_bytes": self.memory_terms_bytes,
            "binding": self.binding,
            "nearest": str(self.nearest),
            "nearest_residual": self.nearest.residual,
            "changes": list(self.changes),
            "elsewhere": list(self.elsewhere),
            "warnings": list(self.warnings),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Returns (label, text) pairs for people."""
        row = self.row
        facts = [
            ("layout", describe(row)),
            (
                "step",
                f"{seconds(row['step_time_s'])} s, 90 % interval {interval(row)} s",
            ),
            ("times", str(self.search.machine.calibration)),
            (
                "rate",
                (
                    f"{row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.1%}, HFU"
                    f" {row['hfu']:.1%}{self._base}"
                ),
            ),
            (
                "memory",
                (
                    f"{row['used_bytes'] / 2**30:.1f} GiB a device, risk"
                    f" {row['out_of_memory_probability']:.1%}"
                ),
            ),
        ]
        if self.tokens is not None:
            price = "" if row["price_usd"] is None else f", {row['price_usd']:,.0f} USD"
            facts.append((f"{self.tokens:.3g} tokens", f"{row['days']:,.1f} days{price}"))
        facts += [
            ("limited by", self.binding),
            ("nearest measured run", str(self.nearest)),
        ]
        more = {
            "other choice": self.changes,
            "other engines": [f"not by the kit's engines: {'; '.join(self.elsewhere)}"],
            "warning": self.warnings,
        }
        return facts + [(label, text) for label, texts in more.items() for text in texts]

    def _repr_html_(self) -> str:
        return html_table(
            f"{self.search.spec.name} on {self.search.machine.site.name}", self.facts()
        )


def answers(search: Search, count: int = 5, *, tokens: float | None = None) -> list[Answer]:
    """Returns the `count` fastest feasible layouts, explained, in the order of the search.

    A training budget in tokens gives days and price.

    Raises:
        ConfigError: count or tokens below 1.
    """
    if count < 1 or (tokens is not None and not (math.isfinite(tokens) and tokens >= 1)):
        raise ConfigError(
            f"search.answers: count {count}, tokens {tokens} are not allowed. Give numbers from 1."
        )
    return [
        Answer(search=search, index=int(index), tokens=tokens) for index in search.fastest(count)
    ]


def _changed(answer: Answer, name: str, factors: dict[str, float]) -> str | None:
    """Returns which layout wins on a changed machine, if it is another and more than 1 % faster
    there.
    """
    search = answer.search
    hardware = search.machine.hardware
    values = {field: getattr(hardware, field) * factor for field, factor in factors.items()}
    machine = dataclasses.replace(search.machine, hardware=dataclasses.replace(hardware, **values))
    fits = np.flatnonzero(search.used_bytes <= machine.most_bytes(search.max_risk))
    if not len(fits):
        return f"with {name}, no layout fits"
    rows = fits[np.argsort(search.step_time_s[fits])[:SHORTLIST]]
    rows = np.union1d(rows, [answer.index]) if answer.index in fits else rows
    times = np.broadcast_to(machine.step_time(search.layouts.select(rows)).total_s, rows.shape)
    best = int(rows[times.argmin()])
    if answer.index not in rows:
        return (
            f"with {name}, this layout does not fit; {describe(search.row(best))} takes"
            f" {times.min():.4g} s"
        )
    here = float(times[np.searchsorted(rows, answer.index)])
    if best == answer.index or times.min() > 0.99 * here:
        return None
    return f"with {name}, {describe(search.row(best))} is {1 - times.min() / here:.0%} faster"


def _runner_up(answer: Answer) -> str | None:
    """Returns the fastest feasible layout with other tensor or pipeline degrees."""
    search = answer.search
    layouts = answer.search.layouts
    t = answer.plan.tensor_parallel
    p = answer.plan.pipeline_parallel
    other = (layouts.tensor_parallel != t) | (layouts.pipeline_parallel != p)
    # Of one element where all layouts have the same degrees.
    rows = search.order[np.broadcast_to(other, search.step_time_s.shape)[search.order]]
    if not len(rows):
        return None
    return (
        f"with other degrees, the fastest is {describe(search.row(int(rows[0])))}:"
        f" {search.step_time_s[rows[0]] / search.step_time_s[answer.index] - 1:+.1%} time"
    )
