"""Explanations of a layout that a search found: what limits its speed, on which hypothetical
machines (with other memory or links) another layout would be faster, and the prediction error for
the most similar published run.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from cluster.record import html_table
from kit.config.plan import Plan
from kit.errors import ConfigError
from kit.estimate.choose.budget import Budget
from kit.estimate.choose.nearest import NearestRun, measured_mfu, nearest_run
from kit.estimate.choose.search import (
    BELIEVABLE_SHARE,
    Search,
    describe_layout,
    interval_text,
    seconds_text,
)
from kit.estimate.fit.store import causal_mfu
from kit.estimate.theory.schedule import simulate_plan

SHORTLIST = 2000
"""Largest number of layouts that are evaluated on a changed machine. They are the fastest layouts
that fit in its memory. The limit saves time."""
MAX_MEMORY_RATIO = 1.5
"""Largest memory of a layout that is too large for the device but is still considered, as a
multiple of the device's memory. If such a layout would be faster, the explanation says that memory
limits the chosen layout. Larger layouts are ignored, since no small change of the machine makes
them fit."""
MAX_RUN_DISTANCE = 4.0
"""Largest `NearestRun.distance`, without unit, between a layout and the most similar published run.
Above it, a warning calls the prediction outside the measured range."""
PCIE_BYTES_PER_S = 64e9
"""Bytes/s in each direction between a GPU and its host over 16 lanes of PCIe 5 (PCI-SIG). H100,
H200, B200 and MI300X have this link. It limits the offload of optimizer states, which are copied to
the GPU and back in each step. At best the two copies overlap."""
LONG_SEQUENCE = 16_384
"""Smallest sequence length, in tokens, at which layouts with context parallelism are tried in
addition."""
ROUNDING = 1e-6
"""Largest relative difference of two step times that counts as a rounding error."""
SIMULATED_ROUNDS = 6
"""Largest number of micro-batches per pipeline device that are simulated. Each further micro-batch
only adds the time of the slowest device, so this time is added without simulation."""
USEFUL_TERMS = ("gemm", "attention")
"""Terms of the modelled step time in which a device computes the FLOPs of the network. All other
terms are lost time."""
OUTSIDE_PIPELINE_TERMS = ("data_parallel", "optimizer", "overhead")
"""Terms of the modelled step time that the simulation of a pipeline does not contain. Their seconds
are added to the simulated time."""
CHANGED_MACHINES = {
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
"""Maps the description of a changed machine to its changes. The changes map a field of `Hardware`
to a factor, by which the number of the present machine is multiplied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Texts that explain why a layout is not faster, what would be faster, and how reliable its
    predicted step time is.
    """

    simulated_share: float
    """Simulated step time of the layout divided by its step time in closed form. The simulation
    runs the pipeline's schedule event by event.

    The ratio checks the closed form and is not a second estimate of the step time. The simulation
    uses the stage times of the closed form, but no delays of single ranks. On published runs the
    simulated time is therefore 0 to 10 % shorter. A ratio above 1 means that the time in closed
    form is too short for the schedule."""
    limited_by: str
    """Reason why the step is not faster: a faster layout needs too much memory, or the largest
    loss of time in the step."""
    other_choices: tuple[str, ...]
    """Descriptions of layouts that would be faster on changed machines, and of the fastest layout
    with other tensor or pipeline parallel degrees."""
    nearest: NearestRun
    """Published run most similar to the layout, with the error of its predicted step time."""
    other_engines: tuple[str, ...]
    """Possible gains from features that the kit's engines do not have: context parallelism, overlap
    of collectives with computation, and offload to host memory."""
    warnings: tuple[str, ...]
    """Reasons to distrust the predicted step time or its 90 % interval."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendedLayout:
    """One layout that a search recommends, with its plan, predicted times and memory."""

    search: Search
    index: int
    budget: Budget | None
    """Tokens, days or money of the training, which determine each other. If None, they are not
    computed."""
    plan: Plan
    """Plan of the layout, with all settings with which the engine trains it."""
    row: dict[str, Any]
    """Maps column names to the numbers of the layout: fields of the plan, step time, memory, risk,
    MFU, HFU, tokens per second, and tokens per USD (None if the price is unknown). If a budget is
    given, tokens, days and price in USD are included."""
    time_terms_s: dict[str, float]
    """Maps each term of the modelled step time, e.g. `gemm`, to its seconds. The largest term comes
    first. The seconds add up to the step time."""
    memory_terms_bytes: dict[str, float]
    """Maps each term of the modelled memory, e.g. `activations`, to its bytes on the device that
    needs most memory. The reserve for memory that is not modelled is a term."""
    batch_advice: str | None
    """Recommendation of another batch, or None if no other batch is much faster. All layouts of a
    search have equal advice."""

    @classmethod
    def of(
        cls, search: Search, index: int, budget: Budget | None, batch_advice: str | None
    ) -> "RecommendedLayout":
        """Returns the predicted times, the memory and the plan of the layout that has the position
        `index` in `search.layouts`.
        """
        plan = search.plan(index)
        layout = search.layouts.select(np.array([index]))
        step_time = search.machine.step_time(layout)
        time_terms_s = {
            name: float(np.broadcast_to(value, (1,))[0])
            for name, value in step_time.terms_s.items()
        }
        memory_terms = search.machine.memory(layout).terms()
        row = search.row(index)
        row["tokens_per_s"] = float(step_time.tokens_per_s[0])
        executed = search.executed_flops_per_token(index) / search.spec.flops_per_token()
        row["hfu"] = row["mfu"] * executed
        price = search.num_devices * float(search.machine.hardware.price_per_device_hour)
        usd_per_hour = None if math.isnan(price) else price
        row["tokens_per_usd"] = usd_per_hour and 3600 * row["tokens_per_s"] / usd_per_hour
        if budget is not None:
            row |= budget.use(row["tokens_per_s"], usd_per_hour)
        return cls(
            search=search,
            index=index,
            budget=budget,
            plan=plan,
            row=row,
            time_terms_s=dict(sorted(time_terms_s.items(), key=lambda item: -item[1])),
            memory_terms_bytes={name: float(value[0]) for name, value in memory_terms.items()},
            batch_advice=batch_advice,
        )

    def explain(self) -> Explanation:
        """Returns the explanation why this layout is the fastest. The method simulates the
        pipeline's schedule, and evaluates the fastest layouts on hypothetical machines, such as one
        with a faster network. It takes about 0.1 s.
        """
        machine = self.search.machine
        simulated_share = self._simulate_schedule()
        nearest = nearest_run(self.search.spec, self.plan, machine.hardware, machine.coefficients)
        other_choices = [
            _choice_on_changed_machine(self, name, factors)
            for name, factors in CHANGED_MACHINES.items()
        ]
        other_choices.append(_choice_with_other_degrees(self))
        return Explanation(
            simulated_share=simulated_share,
            limited_by=_limit(self),
            other_choices=tuple(text for text in other_choices if text),
            nearest=nearest,
            other_engines=_gains_of_other_engines(self),
            warnings=tuple(_warnings(self, simulated_share, nearest)),
        )

    def _simulate_schedule(self) -> float:
        """Returns the simulated step time of the layout divided by its step time in closed form."""
        plan = self.plan
        terms = self.time_terms_s
        outside_s = sum(terms[name] for name in OUTSIDE_PIPELINE_TERMS)
        m = plan.num_microbatches
        p = plan.pipeline_parallel
        times = self.search.machine.stage_times(self.search.spec, plan, terms)
        # Seconds of forward and backward pass of one micro-batch, one element per stage.
        stages_s = times["forward_s"] + times["backward_input_s"] + times["backward_weight_s"]
        simulated = min(m, SIMULATED_ROUNDS * p)
        result = simulate_plan(plan, num_microbatches=simulated, **times)
        devices_s = np.bincount(result.order.device_of_stage, weights=stages_s, minlength=p)
        makespan_s = result.makespan_s + (m - simulated) * float(devices_s.max())
        return (makespan_s + outside_s) / sum(terms.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers of the layout and its explanation as plain values for JSON."""
        explanation = self.explain()
        return {
            **self.row,
            "simulated_share": explanation.simulated_share,
            "time_terms_s": self.time_terms_s,
            "memory_terms_bytes": self.memory_terms_bytes,
            "binding": explanation.limited_by,
            "nearest": str(explanation.nearest),
            "nearest_residual": explanation.nearest.residual,
            "changes": list(explanation.other_choices),
            "elsewhere": list(explanation.other_engines),
            "warnings": list(explanation.warnings),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Returns pairs (label, text) for display: the numbers of the layout, then its
        explanation.
        """
        row = self.row
        explanation = self.explain()
        step_s = seconds_text(row["step_time_s"])
        rate = f"{row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.1%}, HFU {row['hfu']:.1%}"
        used_gib = row["used_bytes"] / 2**30
        facts = [
            ("layout", describe_layout(row)),
            ("step", f"{step_s} s, 90 % interval {interval_text(row)} s"),
            ("times", str(self.search.machine.calibration)),
            ("rate", rate + self._basis_note()),
        ]
        if self.search.spec.num_local_layers:
            facts.append(("MFU and HFU", self._window_note()))
        risk = row["out_of_memory_probability"]
        memory = f"{used_gib:.1f} GiB a device, risk of running out of memory {risk:.1%}"
        facts.append(("memory", memory))
        if self.budget is not None:
            text = self.budget.text(row, self.search.spec.num_params)
            facts.append((self.budget.label, text))
        facts.append(("limited by", explanation.limited_by))
        facts.append(("nearest published run", str(explanation.nearest)))
        facts += [("other choice", text) for text in explanation.other_choices]
        gains = "; ".join(explanation.other_engines)
        facts.append(("other engines", f"features that the kit's engines lack: {gains}"))
        facts += [("warning", text) for text in explanation.warnings]
        return facts

    def _basis_note(self) -> str:
        """Returns a note on the basis of MFU and HFU, or an empty text.

        For a plan that does not train in bf16, it names the peak of which MFU and HFU are
        fractions. For full recomputation in an engine that stops before a block's last matrix
        product, it says that HFU counts whole blocks, as the step time does.
        """
        plan = self.plan
        note = ""
        if plan.precision != "bf16":
            wide = float(self.search.machine.hardware.peak_flops_per_s)
            ratio = self.search.peak_flops_per_s / wide
            note += (
                f" of the peak in {plan.precision}, which is {ratio:.3g} times the peak in bf16"
                " (attention and logits compute in bf16)"
            )
        is_native = plan.capabilities.is_torch_native
        if plan.recompute == "full" and not (is_native or plan.recomputes_whole):
            note += (
                " (HFU and step time count whole blocks as recomputed, as in Megatron; engine"
                f" {plan.engine} stops before the last matrix product of a block)"
            )
        return note

    def _window_note(self) -> str:
        """Returns the reason why MFU and HFU of a model with attention windows differ without
        recomputation.
        """
        spec = self.search.spec
        return (
            f"differ without recomputation too: {spec.num_local_layers} of {spec.num_layers} layers"
            f" have an attention window. MFU counts the {spec.sliding_window:,} keys of the window"
            f" for each token, HFU all {spec.sequence_length:,} keys of the sequence, which the"
            " kit's attention computes and then masks"
        )

    def _repr_html_(self) -> str:
        return html_table(
            f"{self.search.spec.name} on {self.search.machine.site.name}", self.facts()
        )


def answers(
    search: Search,
    count: int = 5,
    *,
    tokens: float | None = None,
    budget: Budget | None = None,
) -> list[RecommendedLayout]:
    """Returns the `count` fastest feasible layouts with their plans, times and memory, fastest
    first. The list is shorter if fewer layouts are feasible.

    `tokens` is the training budget in tokens. If it is given, the days and the price of the
    training are computed for each layout. `budget` may state days or money instead.

    Raises:
        ConfigError: `count` or `tokens` is below 1.
    """
    is_budget = tokens is None or (math.isfinite(tokens) and tokens >= 1)
    if count < 1 or not is_budget:
        raise ConfigError(
            f"search.answers: count {count}, tokens {tokens} are not allowed. Give numbers from 1."
        )
    if tokens is not None:
        budget = Budget(tokens=tokens)
    batch_advice = search.advise_batch()
    return [
        RecommendedLayout.of(search, int(index), budget, batch_advice)
        for index in search.fastest(count)
    ]


def _limit(answer: RecommendedLayout) -> str:
    """Returns a text with the reason why the step of the layout is not faster: memory, or the
    largest loss of time.
    """
    search = answer.search
    capacity = float(search.machine.hardware.memory_bytes)
    in_reach = ~search.feasible & (search.used_bytes <= MAX_MEMORY_RATIO * capacity)
    rows = np.flatnonzero(in_reach)
    if len(rows):
        fastest = int(rows[np.argmin(search.step_time_s[rows])])
        gain = 1 - search.step_time_s[fastest] / search.step_time_s[answer.index]
        if gain > 0.01:
            layout = describe_layout(search.row(fastest))
            return (
                f"memory: {layout} would be {gain:.0%} faster, but needs "
                f"{search.used_bytes[fastest] / 2**30:.0f} GiB, and a device has"
                f" {capacity / 2**30:.0f} GiB"
            )
    terms = answer.time_terms_s
    total_s = sum(terms.values())
    useful_s = sum(terms[name] for name in USEFUL_TERMS)
    lost = next(name for name in terms if name not in USEFUL_TERMS)
    part = lost.replace("_", " ")
    if lost.endswith("_parallel"):
        part += " communication"
    return (
        f"computation: {useful_s / total_s:.0%} of the step; the largest other part is {part},"
        f" {terms[lost] / total_s:.0%} of the step"
    )


def _choice_on_changed_machine(
    answer: RecommendedLayout, name: str, factors: dict[str, float]
) -> str | None:
    """Returns a text that names the fastest layout on a changed machine. Returns None if the layout
    of `answer` is at most about 1 % slower than the fastest layout.

    `name` describes the change. `factors` maps fields of `Hardware` to multipliers.
    """
    search = answer.search
    hardware = search.machine.hardware
    values = {field: getattr(hardware, field) * factor for field, factor in factors.items()}
    machine = dataclasses.replace(search.machine, hardware=dataclasses.replace(hardware, **values))
    fits = np.flatnonzero(search.used_bytes <= machine.max_used_bytes(search.max_risk))
    if not len(fits):
        return f"with {name}, no layout fits"
    is_tried = np.zeros(len(search.layouts), bool)
    is_tried[fits[np.argsort(search.step_time_s[fits])[:SHORTLIST]]] = True
    is_tried[answer.index] |= answer.index in fits
    rows = np.flatnonzero(is_tried)
    times_s = np.broadcast_to(machine.step_time(search.layouts.select(rows)).total_s, rows.shape)
    fastest_s = float(times_s.min())
    best = int(rows[times_s.argmin()])
    layout = describe_layout(search.row(best))
    if answer.index not in rows:
        seconds = seconds_text(fastest_s)
        return f"with {name}, this layout does not fit; {layout} takes {seconds} s"
    answer_s = float(times_s[np.searchsorted(rows, answer.index)])
    if best == answer.index or fastest_s > 0.99 * answer_s:
        return None
    return f"with {name}, {layout} is {1 - fastest_s / answer_s:.0%} faster"


def _choice_with_other_degrees(answer: RecommendedLayout) -> str | None:
    """Returns a text that names the fastest feasible layout with another tensor or pipeline
    parallel degree than the layout of `answer`. Returns None if no such layout is feasible.
    """
    search = answer.search
    layouts = search.layouts
    is_other = (layouts.tensor_parallel != answer.plan.tensor_parallel) | (
        layouts.pipeline_parallel != answer.plan.pipeline_parallel
    )
    # If all layouts have equal degrees, the mask has one element. Indexing needs one per layout.
    is_other = np.broadcast_to(is_other, search.step_time_s.shape)
    rows = search.order[is_other[search.order]]
    if not len(rows):
        return None
    fastest = int(rows[0])
    slower = search.step_time_s[fastest] / search.step_time_s[answer.index] - 1
    layout = describe_layout(search.row(fastest))
    return (
        f"with other degrees of tensor or pipeline parallelism, the fastest is {layout}: step"
        f" time {slower:+.1%}"
    )


def _gains_of_other_engines(answer: RecommendedLayout) -> tuple[str, ...]:
    """Returns texts with the possible gains from context parallelism, overlap of collectives and
    offload, which the kit's engines do not have.
    """
    layout = answer.search.layouts.select(np.array([answer.index]))
    overlapped = dataclasses.replace(
        layout, data_overlap=np.array(True), tensor_overlap=np.array(True)
    )
    overlapped_s = float(answer.search.machine.step_time(overlapped).total_s[0])
    gain = overlapped_s / answer.row["step_time_s"] - 1
    optimizer_bytes = answer.memory_terms_bytes["optimizer"]
    activation_bytes = answer.memory_terms_bytes["activations"]
    texts = []
    search = answer.search
    by_context = None
    if search.spec.sequence_length >= LONG_SEQUENCE:
        by_context = search.with_context_parallel()
    if by_context is not None:
        best = by_context.row(int(by_context.order[0]))
        context_gain = best["step_time_s"] / answer.row["step_time_s"] - 1
        seconds = seconds_text(best["step_time_s"])
        texts.append(
            f"context parallelism ({describe_layout(best)}: {seconds} s, step time"
            f" {context_gain:+.1%})"
        )
    return (
        *texts,
        f"overlap of collectives with computation (step time {gain:+.1%})",
        f"offload of optimizer states ({optimizer_bytes / 2**30:.1f} GiB less a device; copying"
        " them over PCIe 5 at 64 GB/s takes at least"
        f" {seconds_text(optimizer_bytes / PCIE_BYTES_PER_S, 2)} s a step), or of activations (at"
        f" most {activation_bytes / 2**30:.1f} GiB less)",
    )


def _warnings(answer: RecommendedLayout, simulated_share: float, nearest: NearestRun) -> list[str]:
    """Returns texts with reasons to distrust the prediction for the layout of `answer`. The most
    general reasons come first.
    """
    search = answer.search
    site = search.machine.site
    row = answer.row
    plan = answer.plan
    texts = []
    if plan.untrained:
        untrained = " and ".join(f"{name} {getattr(plan, name)}" for name in plan.untrained)
        texts.append(
            f"{untrained}: the kit plans this, it does not train it; `kit launch` refuses it."
        )
    if search.machine.code_base != "kit":
        texts.append(
            f"time and memory are those of {search.machine.code_base}'s kernels, which the"
            " kit's engines do not run."
        )
    hardware = search.machine.hardware
    ceiling = site.device.matmul_flops_per_s.get("bf16")
    rate = row["hfu"] * search.peak_flops_per_s
    if ceiling and rate > BELIEVABLE_SHARE * ceiling.value and not hardware.is_narrow:
        believable_s = seconds_text(float(search.believable_step_s[answer.index]))
        texts.append(
            f"{rate / 1e12:.0f} TFLOP/s per device is not believable: no matrix product was"
            f" seen above {ceiling.value / 1e12:.0f} ({ceiling.source}). The layout is ranked as if"
            f" a step took {believable_s} s, at {BELIEVABLE_SHARE:.0%} of this rate. Calibrate on a"
            " run of this machine."
        )
    best_mfu = measured_mfu(site.device.name, plan.precision, is_causal=True)
    # Published MFUs are fractions of the bf16 peak (`measured_mfu`).
    wide = search.peak_flops_per_s / float(hardware.peak_flops_per_s)
    mfu = causal_mfu(row["mfu"] * wide, search.spec)
    if best_mfu and mfu > best_mfu:
        texts.append(
            f"MFU without masked pairs of tokens: {mfu:.1%}, above the {best_mfu:.1%} that"
            " published runs on this device reach."
        )
    if simulated_share > 1 + ROUNDING:
        texts.append(
            "simulated event by event, the schedule takes"
            f" {simulated_share - 1:.1%} longer than this step time. Prefer a layout without"
            " this warning."
        )
    texts += search.prediction(answer.index).warnings
    texts += _wide_tensor_warnings(answer)
    if answer.batch_advice:
        texts.append(answer.batch_advice)
    measured_s = row["step_time_s"] / (1 + nearest.residual)
    if nearest.distance > MAX_RUN_DISTANCE:
        texts.append("no published run is near: a prediction outside the measured range.")
    elif not row["step_time_low_s"] <= measured_s <= row["step_time_high_s"]:
        texts.append(
            "the step time of the nearest published run is missed by more than the interval"
            f" allows. Its machine is predicted with the efficiencies of {site.name}: trust the"
            " interval only as far as these hold."
        )
    return texts


def _wide_tensor_warnings(answer: RecommendedLayout) -> list[str]:
    """Returns warnings about tensor parallel groups that span several nodes, in the layout of
    `answer` and in the other layouts among the five fastest of the search.
    """
    search = answer.search
    texts = []
    degree = answer.plan.tensor_parallel
    near = int(search.machine.hardware.node_devices)
    if degree > near:
        place = f"the {near} devices on fast links"
        if near == search.machine.site.devices_per_node:
            place = f"the node of {near} devices"
        texts.append(
            f"TP{degree} leaves {place}, which few published runs did. Trust this layout less than"
            f" one with at most TP{near}."
        )
    untried_degrees = set()
    for other in search.fastest(5):
        untried = search.prediction(int(other)).unmeasured_features
        if other != answer.index and "tensor parallelism across nodes" in untried:
            untried_degrees.add(int(search.layouts.tensor_parallel[other]))
    texts += [
        f"TP{untried} among the fastest layouts leaves the node, and no measured run of this"
        " machine had as many tensor ranks. Trust those layouts last."
        for untried in sorted(untried_degrees)
    ]
    return texts
