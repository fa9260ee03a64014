"""Functions that create run directories with recorded steps, for tests of figures. No job trains
these runs.
"""

import json
from pathlib import Path
from typing import Any

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.tuning.objectives import plan_of_trial
from kit.evaluate.report import EvalReport, Metric, TaskScore
from kit.interop.logs.importers import import_log
from kit.papers.frontier_demo import MODEL, STEPS, STUDY, measured_objective
from kit.run import Run
from tests.evaluate.conftest import task_score
from tests.support.runs import new_run

PLAN_175B: dict[str, Any] = {"tensor_parallel": 4, "pipeline_parallel": 16, "zero_stage": 1}
PLAN_175B |= {"recompute": "full", "precision": "bf16"}
SLOW_FIRST = 5.0
"""Slowdown factor of the first two steps. Figures must not count these warm-up steps."""


def values(rows: list[dict], **wanted: object) -> list[dict]:
    """Returns the table rows in which each column named in `wanted` has the given value."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def record(directory: Path, spec: ModelSpec, plan: Plan, site: Site, tokens_per_s: float) -> Run:
    """Creates a run that trains `tokens_per_s` over all devices, and returns it. Its first two
    steps are slower.
    """
    recipe = Recipe(data="data", num_steps=STEPS)
    run = new_run(directory, spec=spec, plan=plan, recipe=recipe, site=site)
    run.plan.write(run.directory / "plan.attempt_01.json")
    tokens = plan.global_batch_size * spec.sequence_length
    same = {"attempt": 1, "tokens": tokens, "loss": 9.0, "grad_norm": 1.0, "learning_rate": 1e-3}
    rows = [
        same
        | {"step": step, "time": 1e9 + step, "memory_bytes": 30 * 2**30}
        | {"step_time_s": tokens / tokens_per_s * (SLOW_FIRST if step <= 2 else 1 + step / 1000)}
        for step in range(1, STEPS + 1)
    ]
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def cluster_run(directory: Path, hfu: float = 0.35, replicas: int = 2) -> Run:
    """Records a run of the 175B model on Frontier with 64 GCDs per replica and 640 sequences per
    step. Its speed gives the hardware FLOPs utilisation `hfu`.
    """
    spec = ModelSpec.preset("gpt-175b")
    plan = Plan(**PLAN_175B, data_parallel=replicas, global_batch_size=640)
    flops = spec.hardware_flops_per_token("full", whole=plan.recomputes_whole)
    rate = hfu * 191.5e12 * plan.num_devices / flops
    return record(directory, spec, plan, Site.load("frontier"), rate)


def imported_run(directory: Path, site: str, spec: str, seconds: int, **plan: int | str) -> Run:
    """Writes a log in the format of HLAT's scripts, with `seconds` per step, and imports it with
    `kit import`'s function. The first step of the imported run has no step time.
    """
    log = directory.parent / f"{directory.name}.log"
    times = [(step, *divmod(seconds * step, 60)) for step in range(1, STEPS + 1)]
    log.write_text(
        "".join(
            f"[0]:LOG Wed Dec 21 00:{minute:02d}:{second:02d} 2022 - (0, {step}) step_loss :"
            f" {11.25 - step / 10:.4f} learning_rate : {1.5e-7 * step:.2e} throughput : 93.1"
            " grad-norm : 3.25\n"
            for step, minute, second in times
        )
    )
    asked = {"site": Site.load(site), "spec": ModelSpec.preset(spec)}
    changes = {"plan": plan, "recipe": {"num_steps": STEPS}}
    import_log(log, directory, format="nxdt", **asked, changes=changes)
    return Run.open(directory)


def demo_study(directory: Path, rates: dict[tuple[int, int, int], float]) -> Path:
    """Records the runs of the demo study. `rates` maps (tensor parallelism, pipeline parallelism,
    number of micro-batches) to tokens per second. Other layouts get 1,000 per rank.
    """
    site = Site.load("laptop").with_measured_peak("fp32", 1e11, "test").replace(devices_per_node=2)
    rate = measured_objective(directory, "data")
    for parameters in STUDY:
        plan = plan_of_trial(parameters, devices_per_node=1, base=rate.base)
        key = (plan.tensor_parallel, plan.pipeline_parallel, plan.num_microbatches)
        name = "-".join(f"{key}_{value}" for key, value in sorted(parameters.items()))
        record(directory / name, MODEL, plan, site, rates.get(key, 1000.0 * plan.num_devices))
    return directory


def score(
    task: str, value: float, *, shots: int = 0, items: int = 50, metric: str = "acc_norm"
) -> TaskScore:
    given = {"num_items": items, "total_items": 100, "num_fewshot": shots, "chance": 0.5}
    return task_score(task, metrics=(Metric.of(metric, value, 0.05, items),), **given)


def scored(run, *scores: TaskScore, step: int) -> None:
    done = {"step": step, "tokens_seen": step * 2048, "tokenizer_sha256": "00"}
    report = EvalReport(name=run.name, **done, scores=scores)
    report.write(run.directory / "eval" / f"step_{step:08d}.json")
