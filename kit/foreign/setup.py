"""What was trained and how, as the log of another trainer tells it: model, layout, recipe, and what disagrees."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from cluster.record import ConfigError
from kit.convert.other_trainers import OTHER_WORK, megatron_spec
from kit.foreign.logs import LoggedStep, LogParser, number
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec

DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel")
FSDP_STAGES = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage of each strategy of Megatron-FSDP's."""
ABSENT = ("None", "False", "0", "0.0", "[1]", "")
"""The last but one is how Megatron-DeepSpeed prints one expert, that is none."""
LARGEST_INTERVAL = 10_000
RECIPE_ARGUMENTS = {
    "lr": "learning_rate", "min_lr": "min_learning_rate", "adam_beta1": "beta1", "adam_beta2": "beta2",
    "adam_eps": "eps", "weight_decay": "weight_decay",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A foreign run in the kit's words."""

    spec: ModelSpec
    plan: Plan
    recipe: Recipe
    printed_batch: int
    """Sequences of a step according to the log."""
    engine_share: Fraction
    """Sequences that the engine really ran, over those that the log counts."""
    interval: int
    """Steps that one line stands for."""
    notes: tuple[str, ...]


def describe(
    parser: LogParser,
    logged: list[LoggedStep],
    *,
    spec: ModelSpec | None,
    changes: dict[str, dict[str, Any]],
) -> Described:
    """Returns the run that a log tells of; model and fields that the user gives (`spec`, `changes`) win.

    Raises:
        ConfigError: something is neither in the log nor given, a line for each such thing; or what was given
            contradicts the log.
    """
    notes, lacking = list[str](), list[str]()
    with _noted(lacking):
        spec = (spec or _told_spec(parser.arguments, notes)).replace(**changes["spec"])
    with _noted(lacking):
        told = _told_plan(parser.arguments, changes["plan"], notes)
    with _noted(lacking):
        batch = _printed_batch(parser.arguments, logged, changes["plan"])
    if lacking:
        raise ConfigError("\n".join(lacking))
    assert spec
    asked = changes["plan"].get("global_batch_size")
    share = Fraction(asked, batch) if asked else _engine_share(parser, notes)
    plan = _plan(told, batch * share, changes["plan"])
    recipe = _recipe(parser.arguments, logged, changes["recipe"])
    if "lr" not in parser.arguments:
        notes.append("the log does not tell the recipe: fields of recipe.json that were not given are defaults")
    interval = _interval(parser.arguments, logged)
    if interval > LARGEST_INTERVAL:
        raise ConfigError(
            f"import: one line for {interval:,} steps is more than the {LARGEST_INTERVAL:,} that are believed. "
            f"Is the log damaged? Remove the lines in it that no trainer printed."
        )
    if interval > 1:
        notes.append(f"one line stands for {interval} steps; each of them is recorded with {parser.values}")
    return Described(
        spec=spec, plan=plan, recipe=recipe, printed_batch=batch, engine_share=share, interval=interval,
        notes=tuple(notes),
    )  # fmt: skip


@contextlib.contextmanager
def _noted(lacking: list[str]) -> Iterator[None]:
    """Keeps what is found to be lacking, so that all of it is told at once."""
    try:
        yield
    except ConfigError as error:
        lacking.append(str(error))


def _told_spec(arguments: dict[str, str], notes: list[str]) -> ModelSpec:
    other = next((name for name in OTHER_WORK if arguments.get(name, "None") not in ABSENT), None)
    if other:
        raise ConfigError(
            f"model: {other} is {arguments[other]} in the log, which the kit's decoder has not: its FLOPs would be "
            f"wrong. Give --model with a dense model that does as much work for a token."
        )
    return megatron_spec(arguments, notes)


def _engine_share(parser: LogParser, notes: list[str]) -> Fraction:
    """Returns 1, or less where DeepSpeed's pipeline ran fewer micro-batches than Megatron counts sequences for.

    DeepSpeed cuts the global batch by its own micro-batch, then Megatron feeds it micro-batches of Megatron's size.
    A run with 1 here and 4 there trains on a quarter of what both print. Source: `set_train_batch_size` in
    deepspeed/runtime/engine.py; commit ef4161a of sajal-vt/Megatron-DeepSpeed-ORNL, whose log prints 149 TFLOP/s.
    """
    fed = parser.arguments.get("micro_batch_size", "")
    counted = parser.engine.get("train_micro_batch_size_per_gpu", "")
    pipeline = parser.arguments.get("no_pipeline_parallel") != "True"
    if not (pipeline and fed.isdigit() and counted.isdigit()) or fed == counted or "0" in (fed, counted):
        return Fraction(1)
    share = Fraction(int(fed), int(counted))
    notes.append(
        f"Megatron fed micro-batches of {fed}, DeepSpeed counted {counted}: each step ran {share} of the sequences "
        f"that the log prints, and tokens are counted so"
    )
    return share


def _printed_batch(arguments: dict[str, str], logged: list[LoggedStep], plan_changes: dict[str, Any]) -> int:
    """Returns the sequences of one step that the log tells, or those that were given where it does not."""
    printed = [step.samples for step in logged if step.samples]
    if printed:
        return printed[-1]
    if arguments.get("global_batch_size", "").isdigit():
        return int(arguments["global_batch_size"])
    pairs = [(step.step, step.consumed_samples) for step in logged if step.consumed_samples]
    rates = [
        (samples - before) / (step - last)
        for (last, before), (step, samples) in zip(pairs, pairs[1:], strict=False)
        if step > last and samples > before
    ]
    asked, counted = plan_changes.get("global_batch_size"), collections.Counter(rates).most_common(1)
    if asked and counted and counted[0][0] != asked:
        raise ConfigError(
            f"plan.global_batch_size: {asked} sequences, but consumed_samples grows by {counted[0][0]:g} a step in "
            f"the log. Leave it out, or give the log of this run."
        )
    if asked or counted:
        return asked or int(counted[0][0])
    raise ConfigError("plan.global_batch_size: not in the log. Give --set plan.global_batch_size=SEQUENCES.")


def _plan(told: dict[str, Any], batch: Fraction, given: dict[str, Any]) -> Plan:
    if batch.denominator > 1:
        raise ConfigError(f"plan.global_batch_size: {batch} sequences. Give the number really run by --set.")
    return Plan.from_dict({"precision": "bf16", **told, "global_batch_size": int(batch), **given})


def _told_plan(arguments: dict[str, str], given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if "world_size" not in arguments:
        if missing := [name for name in DEGREES if name not in given]:
            words = " ".join(f"--set plan.{name}=..." for name in missing)
            raise ConfigError(f"plan: the log does not tell {', '.join(missing)}. Give {words}")
        if "precision" not in given:
            notes.append("bf16 is assumed; --set plan.precision=fp32 if it was not")
        return {}
    tensor = _whole(arguments, "tensor_model_parallel_size", 1)
    pipeline = _whole(arguments, "pipeline_model_parallel_size", 1)
    virtual = _whole(arguments, "virtual_pipeline_model_parallel_size", 1)
    context, exchange = _whole(arguments, "context_parallel_size", 1), arguments.get("cp_comm_type", "p2p")
    full = arguments.get("checkpoint_activations") == "True" or arguments.get("recompute_granularity") == "full"
    selective = arguments.get("recompute_granularity") == "selective"
    if arguments.get("fp16") == "True":
        notes.append("fp16 is shown as bf16, which has the same peak on these devices")
    narrow = arguments.get("fp8", "None") != "None"
    if narrow:
        notes.append("matrix products in fp8: utilisation is of the peak in it")
    half = "True" in (arguments.get("bf16"), arguments.get("fp16"))
    eight = "mxfp8" if arguments.get("fp8_recipe") == "mxfp8" else "fp8"
    return {
        "tensor_parallel": tensor,
        "pipeline_parallel": pipeline,
        "context_parallel": context,
        "context_exchange": "all_to_all" if context > 1 and "a2a" in exchange and "p2p" not in exchange else "ring",
        "data_parallel": max(1, _whole(arguments, "world_size", 1) // (tensor * pipeline * context)),
        "virtual_stages": virtual,
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "zero_stage": _zero_stage(arguments),
        "sequence_parallel": arguments.get("sequence_parallel") == "True" and tensor > 1,
        "recompute": "full" if full else "selective" if selective else "none",
        "micro_batch_size": _whole(arguments, "micro_batch_size", 1),
        "precision": eight if narrow else "bf16" if half else "fp32",
    }


def _zero_stage(arguments: dict[str, str]) -> int:
    """Returns DeepSpeed's stage, or what Megatron-LM's distributed optimizer (1) and FSDP shard as much as."""
    fsdp = "True" in (arguments.get("use_megatron_fsdp"), arguments.get("use_custom_fsdp"))
    strategy = arguments.get("data_parallel_sharding_strategy") if fsdp else None
    stage = 3 if arguments.get("use_torch_fsdp2") == "True" else FSDP_STAGES.get(strategy or "", 0)
    return max(stage, int(arguments.get("use_distributed_optimizer") == "True"), _whole(arguments, "zero_stage", 0))


def _recipe(arguments: dict[str, str], logged: list[LoggedStep], given: dict[str, Any]) -> Recipe:
    found = {name: number(arguments.get(argument)) for argument, name in RECIPE_ARGUMENTS.items()}
    told: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    seen = [step.learning_rate for step in logged if step.learning_rate]
    told["learning_rate"] = told.get("learning_rate") or max(seen, default=3e-4)
    told["min_learning_rate"] = min(told.get("min_learning_rate", 0.0), told["learning_rate"])
    clip = number(arguments.get("clip_grad"))
    told |= {} if clip is None else {"gradient_clip": clip or None}
    told |= {"seed": int(arguments["seed"])} if arguments.get("seed", "").isdigit() else {}
    last = max(step.step for step in logged)
    total = max(
        (step.total_steps for step in logged if step.total_steps), default=_whole(arguments, "train_iters", last)
    )
    data = arguments.get("data_path", "").strip("[]'\"") or "unknown"
    return Recipe.from_dict({"data": os.path.basename(data), "num_steps": max(total, last), **told, **given})


def _interval(arguments: dict[str, str], logged: list[LoggedStep]) -> int:
    if arguments.get("log_interval", "").isdigit():
        return max(1, int(arguments["log_interval"]))
    steps = [step.step for step in logged if step.loss is not None]
    gaps = collections.Counter(after - before for before, after in zip(steps, steps[1:], strict=False))
    return max(1, gaps.most_common(1)[0][0]) if len(steps) > 2 else 1


def _whole(arguments: dict[str, str], name: str, default: int) -> int:
    found = number(arguments.get(name))
    return default if found is None else int(found)
