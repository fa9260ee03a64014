"""What a Plan is in the words of NeuronX Distributed (NxD): HLAT's two recipes. No torch.

Source: the released training scripts of HLAT (github.com/awslabs/HLAT, 7b/ and 70b/), arXiv
2404.10630 section VI.
"""

from collections.abc import Mapping
from typing import Any

from cluster.record import ConfigError
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec

PROFILES = {0: "hlat-7b", 1: "hlat-70b"}
"""The site's set of environment variables for a ZeRO stage, with what HLAT tuned for that
recipe."""
CASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Variables by which HLAT's SDK 2.20 made bf16 of torch's floats. Torch-XLA has dropped them after
2.7, so weights are made bf16 here, and the variables must be off where they still work. Source:
"Migration From XLA_USE_BF16 / XLA_DOWNCAST_BF16", AWS Neuron documentation 2.28."""
ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
COMPILER = "NEURON_CC_FLAGS"
FIRST_GROUP_ALONE = "NEURON_EXPERIMENTAL_COMPRESS_RG"
"""Makes NxD name the first tensor group alone and guess the others from it, as HLAT's 70B did. With
four tensor ranks, which are not neighbours, it guesses wrong."""
TRN1 = ("trn1", "trn1n", "inf2")
"""Platforms on which NxD puts different key/value heads side by side, and copies of one head
apart."""
GROUPED = (*TRN1, "trn2")
"""Platforms on which NxD initialises layers of grouped heads, copied or not
(modules/qkv_linear.py, 0.17 and 0.18)."""
NO_CAST = "--auto-cast=none"
"""Without it, the compiler makes bf16 of fp32 matrix products."""


def nxd_arguments(spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    """Returns the arguments of `neuronx_distributed_config` that are plain values; the engine
    adds classes.
    """
    master = plan.zero_stage == 1
    pipeline = _pipeline(spec, plan) if plan.pipeline_parallel > 1 else None
    return {
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.pipeline_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "optimizer_config": {
            "zero_one_enabled": master,
            # The adapter clips, by a norm in fp32 that counts each weight once.
            "grad_clipping": False,
        },
        # Written out, though NxD would derive them: its defaults have followed other keys from
        # version to version.
        "mixed_precision_config": {
            "use_master_weights": master,
            "use_fp32_grad_acc": master,
            # HLAT: False, so that resuming lost what bf16 does not hold.
            "use_master_weights_in_ckpt": master,
        },
        "pipeline_config": pipeline,
    }


def _pipeline(spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    return {
        "num_microbatches": plan.num_microbatches,
        "input_names": ["input_ids", "labels"],
        "output_loss_value_spec": [True, False],
        "pipeline_cuts": pipeline_cuts(spec, plan),
        "use_zero1_optimizer": plan.zero_stage == 1,
        "use_optimizer_wrapper": True,
        "broadcast_and_average_loss": True,
        "return_loss_on_cpu": False,
    }


def pipeline_cuts(spec: ModelSpec, plan: Plan) -> list[str]:
    """Returns the last block of every pipeline stage but the last, in equal shares, as NxD names
    them.
    """
    share = spec.num_layers // plan.pipeline_parallel
    return [f"model.layers.{share * stage - 1}" for stage in range(1, plan.pipeline_parallel)]


def needed_environment(plan: Plan, flags: str = "") -> dict[str, str]:
    """Returns the variables without which the same calls compute in another precision, or over
    other ranks.

    To the compiler's `flags` one may be added.
    """
    needed = {ROUNDING: "0", **dict.fromkeys(CASTS, "0")}
    if plan.precision == "bf16" and plan.zero_stage == 0:
        needed[ROUNDING] = "1"
    if plan.precision == "fp32" and NO_CAST not in flags.replace("cast none", "cast=none"):
        needed[COMPILER] = f"{flags} {NO_CAST}".strip()
    if plan.tensor_parallel == 4:
        needed[FIRST_GROUP_ALONE] = "0"
    return needed


def job_environment(plan: Plan, site: Site) -> dict[str, str]:
    """Returns the variables that a job needs for the plan, and what HLAT tuned beside them, from
    its site.

    Raises:
        ConfigError: the site is a cluster without such a profile, so not one of Trainium.
    """
    if site.table is None:
        return needed_environment(plan)
    flags = site.table.environment.get(COMPILER, "")
    return site.profile(PROFILES[plan.zero_stage]) | needed_environment(plan, flags)


def check_neuron_environment(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raises ConfigError, naming each, if variables of this process are not what the plan needs.

    HLAT saw pure bf16 without stochastic rounding diverge, and neither NxD nor a loss curve's first
    steps would tell.
    """
    needed = needed_environment(plan, environment.get(COMPILER, ""))
    wrong = [name for name, value in needed.items() if environment.get(name, "0") != value]
    if wrong:
        found = ", ".join(f"{name} is {environment.get(name, 'not set')!r}" for name in wrong)
        wanted = " ".join(f"{name}={needed[name]!r}" for name in wrong)
        raise ConfigError(
            f"plan.precision: {plan.precision!r} with zero_stage {plan.zero_stage} and"
            f" tensor_parallel {plan.tensor_parallel} on engine 'neuron' needs {wanted}, but"
            f" {found}. Launch on a Trainium site, which sets them, or export them."
        )


def check_platform(plan: Plan, spec: ModelSpec, platform: str) -> None:
    """Raises ConfigError if NxD does not lay out grouped key/value heads on this platform, or
    copies them in another order than Trn1's, which `kit.engines.neuron.weights` lays out. The
    platform is as torch_neuronx names it.
    """
    if spec.num_kv_heads < spec.num_heads and platform not in GROUPED:
        raise ConfigError(
            f"spec.num_kv_heads: {spec.num_kv_heads} for num_heads {spec.num_heads} on engine"
            f" 'neuron' is not allowed on {platform!r}: NxD makes layers of grouped heads for"
            f" {', '.join(GROUPED)} only. Use one of these, or num_kv_heads {spec.num_heads}."
        )
    if plan.kv_replication(spec) > 1 and platform not in TRN1:
        raise ConfigError(
            f"plan.tensor_parallel: {plan.tensor_parallel} with spec.num_kv_heads"
            f" {spec.num_kv_heads} on engine 'neuron' copies heads, in an order that is known for"
            f" {', '.join(TRN1)} only; this is {platform!r}. Use tensor_parallel"
            f" {spec.num_kv_heads} or less."
        )
