"""Is a run as fast as it should be? What the estimate says of its plan on its site, beside what its steps took."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from cluster.heartbeats import RankHeartbeat, read_rank_heartbeats
from cluster.record import ConfigError, Record, field_doc
from cluster.site import Site
from kit.errors import RunError
from kit.estimate.choose.nearest import Nearest, nearest_run
from kit.estimate.choose.search import describe, search
from kit.estimate.fit.calibrate import Calibration, calibrate, published_calibration
from kit.estimate.fit.measured_rows import hardware_on
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Layouts
from kit.plan import Plan
from kit.run import Run
from kit.run.metrics import Metrics

WARM, RECENT = 5, 200
"""Steps of an attempt that do not count, and how many of the newest do."""
LEAST = 0.05
"""Share of its stated speed below which a part is called broken, not slow."""
SUSPECTS: dict[str, tuple[tuple[str, ...], float]] = {
    "matrix products": (("matmul_flops_per_s", "attention_flops_per_s"), 0.15),
    "memory bandwidth": (("memory_bytes_per_s",), 0.2),
    "links inside a node": (("near_bytes_per_s", "node_bytes_per_s"), 0.4),
    "the network between nodes": (("network_bytes_per_s",), 0.5),
}
"""What may be slower than the site file says: its numbers in `Hardware`, and by how much, in ln, it usually is. That
spread is our judgement, not a fit: it only orders the explanations."""


OPTIMIZER = "the optimizer"
WAITS, PASSES = "waiting for other ranks or the network", "forward and backward pass"
MEASURED: dict[str, tuple[str, tuple[str, ...]]] = {
    "waiting for data": ("data_s", ()),
    OPTIMIZER: ("optimizer_s", ("optimizer",)),
    WAITS: ("waiting_s", ("tensor_parallel", "context_parallel", "pipeline_send", "bubble", "data_parallel")),
    "reduction, norm and clipping of gradients": ("reduction_s", ("data_parallel",)),
    PASSES: ("forward_backward_s", ("gemm", "attention", "elementwise", "host_launch", "recompute", "overhead")),
}  # fmt: skip
"""Parts of a step in words, what tells most first: their column of the metrics, and the terms of the estimate that they
should take. A wait for others lies within the other parts."""
LINKS_WAIT = "the links, or ranks slow by turns, for which every rank waits"
LINKS = ("links inside a node", "the network between nodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspect(Record):
    """What would alone explain a slow step: a part of the machine, or a part of the step that was measured."""

    part: str = field_doc("in words")
    others_s: float | None = field_doc("of a step, as the other ranks measured it", default=None)
    speed: float | None = field_doc(
        "share of the site file's number at which the step takes what it took", default=None
    )
    measured: float | None = field_doc("share that was measured at the start of the job", default=None)
    seconds: float | None = field_doc("of a step, as rank 0, or the rank that is named, measured it", default=None)

    def __str__(self) -> str:
        if self.speed is None:
            others = "" if self.others_s is None else f"; the other ranks work {self.others_s:.3g} s"
            return f"{self.part}, {self.seconds:.3g} s a step{others} (measured)"
        seen = "" if self.measured is None else f" (measured at the start: {self.measured:.0%})"
        return f"{self.part} at {self.speed:.0%} of the site file's number{seen}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a step of an attempt should take."""

    attempt: int
    plan: Plan
    site: Site
    calibration: Calibration
    layouts: Layouts
    hardware: Hardware
    expected_s: float
    low_s: float
    high_s: float
    """The 90 % interval."""
    terms_s: dict[str, float]
    """Of the estimate, the largest first."""
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace(Expectation):
    """What a step should take, and what it takes."""

    took_s: float
    """Median of the newest steps."""
    parts_s: dict[str, float]
    """What they were made of, on rank 0, as far as it was recorded: names of MEASURED."""
    suspects: tuple[Suspect, ...]
    """Each would alone explain a step slower than the interval; the likeliest first."""
    nearest: Nearest | None

    @property
    def verdict(self) -> str:
        """One sentence, and for a slow run what would explain it."""
        text = sentence(self.took_s, self.expected_s, self.low_s, self.high_s, self.calibration.label)
        if self.took_s <= self.high_s:
            return text
        cause = str(self.suspects[0]) if self.suspects else "no single part of the machine; look at data and host"
        return f"{text}. What would explain it: {cause}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "took_s": self.took_s, "expected_s": self.expected_s, "low_s": self.low_s, "high_s": self.high_s,
            "calibration": self.calibration.label, "verdict": self.verdict, "terms_s": self.terms_s,
            "parts_s": self.parts_s,
            "suspects": [suspect.to_dict() for suspect in self.suspects], "warnings": list(self.warnings),
            "nearest": str(self.nearest) if self.nearest else None,
        }  # fmt: skip


def sentence(took_s: float, expected_s: float, low_s: float, high_s: float, label: str) -> str:
    """Returns how a step compares with its 90 % interval; `label` says what the estimate rests on."""
    band = f"{low_s:.3g} to {high_s:.3g} s a step"
    if low_s <= took_s <= high_s:
        return f"as expected: {took_s:.3g} s, 90 % interval {band} ({label})"
    ratio = took_s / expected_s - 1
    return (
        f"{'slower' if ratio > 0 else 'faster'} than expected by {abs(ratio):.0%}: {took_s:.3g} s, not {band} ({label})"
    )


def expectation(run: Run, attempt: int) -> Expectation:
    """Returns what the estimate says of the steps of an attempt, by its plan and its site.

    Raises:
        ConfigError: the site lacks a number that the estimate needs.
    """
    plan, site = run.plans().get(attempt, run.plan), run.other_sites().get(attempt, run.site)
    layouts = Layouts.of(run.spec, [plan])
    hardware = hardware_on(site, layouts, plan.precision)
    is_local = site.scheduler == "local"
    calibration = calibrate([], site, hardware=hardware) if is_local else published_calibration(site)
    prediction = calibration.predict(layouts, hardware)
    terms = {name: _one(value) for name, value in prediction.step_time.terms_s.items()}
    return Expectation(
        attempt=attempt, plan=plan, site=site, calibration=calibration, layouts=layouts, hardware=hardware,
        expected_s=_one(prediction.total_s), low_s=_one(prediction.low_s), high_s=_one(prediction.high_s),
        terms_s=dict(sorted(terms.items(), key=lambda item: -item[1])), warnings=prediction.warnings,
    )  # fmt: skip


def pace(run: Run) -> Pace:
    """Returns how the newest attempt of a run compares with the estimate.

    Raises:
        RunError: too few steps.
        ConfigError: as `expectation`.
    """
    took_s, attempt, parts_s = _took(run, run.metrics())
    expected = expectation(run, attempt)
    is_published = expected.site.scheduler != "local"
    return Pace(
        **{field.name: getattr(expected, field.name) for field in dataclasses.fields(expected)},
        took_s=took_s, parts_s=parts_s,
        suspects=tuple(_suspects(run, expected, took_s, parts_s)) if took_s > expected.high_s else (),
        nearest=nearest_run(run.spec, expected.plan, expected.hardware, expected.calibration.coefficients)
        if is_published else None,
    )  # fmt: skip


def gains(run: Run, plan: Plan, count: int = 5) -> list[tuple[str, float, float]]:
    """Returns the plans of the same devices and batch that gain most: (changes, share of time gained, risk of memory).

    Raises:
        ConfigError: as `kit.estimate.search`.
    """
    found = search(
        run.spec, run.site, plan.num_devices, plan.global_batch_size, engine=plan.engine,
        calibration=published_calibration(run.site),
    )  # fmt: skip
    now = _one(found.machine.step_time(Layouts.of(run.spec, [plan])).total_s)
    best: dict[frozenset[str], tuple[str, float, float]] = {}
    for index in found.fastest(min(2000, len(found.order))):
        other = found.plan(int(index))
        changed = {name: value for name, value in other.to_dict().items() if value != plan.to_dict()[name]}
        changed.pop("precision", None)
        gain = 1 - float(found.step_time_s[index]) / now
        if gain > 0.01 and frozenset(changed) not in best:
            words = ", ".join(f"{name} {value}" for name, value in changed.items()) or describe(found.row(int(index)))
            best[frozenset(changed)] = (words, gain, found.risk(int(index)))
    return sorted(best.values(), key=lambda change: -change[1])[:count]


def _took(run: Run, metrics: Metrics) -> tuple[float, int, dict[str, float]]:
    """Returns the median time of the newest attempt's newest steps, in seconds, its number, and parts of that time."""
    if len(metrics):
        attempt = int(metrics["attempt"][-1])
        rows = np.flatnonzero((metrics["attempt"] == attempt) & np.isfinite(metrics["step_time_s"]))[WARM:][-RECENT:]
        if len(rows) >= WARM:
            took_s = float(np.median(metrics["step_time_s"][rows]))
            return took_s, attempt, _parts(metrics, rows, took_s)
    raise RunError(f"{run.directory}: the newest attempt has fewer than {2 * WARM} steps. Ask again when it has more.")


def _parts(metrics: Metrics, rows: np.ndarray, took_s: float) -> dict[str, float]:
    """Returns the median seconds of the parts of a step that were recorded, by their names in MEASURED."""
    columns = {
        name: metrics.columns[column][rows] for name, (column, _) in MEASURED.items() if column in metrics.columns
    }
    parts = {name: float(np.median(values)) for name, values in columns.items() if np.isfinite(values).all()}
    phases = [seconds for name, seconds in parts.items() if MEASURED[name][0] not in ("data_s", "waiting_s")]
    if phases and "waiting for data" in parts:  # beside a GPU's work it costs nothing
        parts["waiting for data"] = min(parts["waiting for data"], max(0.0, took_s - sum(phases)))
    return parts


def _suspects(run: Run, expected: Expectation, took_s: float, parts_s: dict[str, float]) -> list[Suspect]:
    """Returns what would alone explain it: a rank or a part of the step, as measured, then parts of the machine.

    Those go by how unusual such a speed would be; what was measured to be well goes last.
    """
    half_s = (took_s - expected.expected_s) / 2
    own_s = parts_s | {PASSES: parts_s[PASSES] - parts_s.get(WAITS, 0.0)} if PASSES in parts_s else parts_s
    surplus = {name: own_s[name] - sum(expected.terms_s[term] for term in MEASURED[name][1]) for name in own_s}
    told = [name for name in MEASURED if surplus.get(name, 0.0) > half_s]
    machine = _machine_suspects(run, expected, took_s, parts_s.get(OPTIMIZER))
    usual_s = sum(expected.terms_s[term] for term in MEASURED[WAITS][1])
    by_rank = _by_rank(read_rank_heartbeats(run.directory, expected.attempt), half_s, usual_s)
    if by_rank:  # it says whom they wait for
        told = [name for name in told if name != WAITS]
    is_links = bool(by_rank) and by_rank[0].part == LINKS_WAIT
    if is_links and any(suspect.part in LINKS for suspect in machine):  # which say more
        by_rank = []
    if is_links or (waits_s := surplus.get(WAITS)) is not None:  # a rank computes or waits
        machine.sort(key=lambda suspect: (suspect.part in LINKS) != (is_links or waits_s > half_s))
    if machine:  # which say more
        told = [name for name in told if name != PASSES]
    elif surplus and not told:
        told = [max(surplus, key=surplus.__getitem__)]
    return [*by_rank, *(Suspect(part=name, seconds=parts_s[name]) for name in told), *machine]


def _by_rank(beats: list[RankHeartbeat], least_s: float, usual_s: float) -> list[Suspect]:
    """Returns what the ranks tell together: one works longer by at least `least_s`, or all wait so beyond `usual_s`."""
    own = {beat.rank: seconds for beat in beats if (seconds := beat.own_s) is not None}
    if len(own) < 2:
        return []
    slow = max(beats, key=lambda beat: own.get(beat.rank, 0.0))
    others_s = statistics.median(seconds for rank, seconds in own.items() if rank != slow.rank)
    if own[slow.rank] - others_s > least_s:
        where = f" on {slow.host}" if slow.host else ""
        return [Suspect(part=f"the work of rank {slow.rank}{where}", seconds=own[slow.rank], others_s=others_s)]
    waits_s = min(beat.parts_s[-1] or 0.0 for beat in beats if beat.rank in own)
    return [Suspect(part=LINKS_WAIT, seconds=waits_s)] if waits_s - usual_s > least_s else []


def _machine_suspects(run: Run, expected: Expectation, took_s: float, optimizer_s: float | None) -> list[Suspect]:
    """Returns the parts of the machine that would alone explain it."""
    measured = _measured(run.directory, run.site)
    found: list[tuple[float, Suspect]] = []
    for part, (fields, usual) in SUSPECTS.items():

        def seconds(speed: float, fields: tuple[str, ...] = fields) -> float:
            own = expected.hardware
            slower = dataclasses.replace(own, **{name: getattr(own, name) * speed for name in fields})
            return _one(expected.calibration.predict(expected.layouts, slower).total_s)

        if seconds(LEAST) < took_s:
            continue
        low, high = LEAST, 1.0
        for _ in range(30):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if seconds(middle) < took_s else (middle, high)
        seen = measured.get(part)
        # A part that was measured is as slow as it was measured to be, give or take a tenth.
        surprise = abs(np.log(high)) / usual if seen is None else abs(np.log(high / min(seen, 1.0))) / 0.1
        if part == "memory bandwidth" and optimizer_s:  # which does nothing but read and write memory
            surprise = abs(np.log(high / min(expected.terms_s["optimizer"] / optimizer_s, 1.0))) / usual
        found.append((float(surprise), Suspect(part=part, speed=high, measured=seen)))
    return [suspect for _, suspect in sorted(found, key=lambda pair: pair[0])]


def _measured(directory: Path, site: Site) -> dict[str, float]:
    """Returns the share of the site file's numbers that the node check at the start of the job has measured."""
    try:
        seen = Site.read(directory / "measured_site.json")
    except (OSError, ConfigError):
        return {}
    shares = {}
    for dtype, fact in seen.device.matmul_flops_per_s.items():
        if (stated := site.device.matmul_flops_per_s.get(dtype)) and stated.value != fact.value:
            shares["matrix products"] = fact.value / stated.value
    ours, theirs = seen.links.inter_node_bytes_per_s, site.links.inter_node_bytes_per_s
    if ours and theirs and ours.value != theirs.value:
        shares["the network between nodes"] = ours.value / theirs.value
    return shares


def _one(values: Any) -> float:
    return float(np.ravel(values)[0])
