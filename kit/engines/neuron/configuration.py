"""Configuration of a plan for NeuronX Distributed (NxD), following the two recipes of HLAT (7B and
70B). Imports no torch.

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
"""Maps the ZeRO stage to the name of a set of environment variables in the site file. Each set has
the values that HLAT tuned for one of its two recipes. The 7B recipe uses ZeRO stage 0, and the 70B
recipe uses ZeRO stage 1."""
CASTS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Environment variables with which HLAT's SDK 2.20 converted torch's floats to bf16. Torch-XLA
removed these variables after 2.7, so the kit itself makes the weights bf16. In versions that still
read the variables, they must be off. Source: "Migration From XLA_USE_BF16 / XLA_DOWNCAST_BF16", AWS
Neuron documentation 2.28."""
ROUNDING = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
"""Environment variable that turns on stochastic rounding to bf16."""
COMPILER = "NEURON_CC_FLAGS"
"""Environment variable with the flags of the compiler neuronx-cc."""
FIRST_GROUP_ALONE = "NEURON_EXPERIMENTAL_COMPRESS_RG"
"""Environment variable that HLAT's 70B recipe turns on. NxD then names only its first tensor
parallel group, and the other groups are derived from this group. The derived groups are wrong for
groups of four ranks, which are not neighbours."""
TRN1 = ("trn1", "trn1n", "inf2")
"""Platforms on which NxD puts different key/value heads on neighbouring ranks, and the copies of
one head on distant ranks."""
GROUPED = (*TRN1, "trn2")
"""Platforms for which NxD implements layers with grouped key/value heads, with or without copies of
the heads (modules/qkv_linear.py, 0.17 and 0.18)."""
NO_CAST = "--auto-cast=none"
"""Compiler flag that keeps fp32 matrix products in fp32. Without it, they are computed in bf16."""


def nxd_arguments(spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    """Returns those arguments of `neuronx_distributed_config` that are plain values and can be
    written as JSON. The engine adds the arguments that are classes or functions.
    """
    master = plan.zero_stage == 1
    pipeline = _pipeline(spec, plan) if plan.pipeline_parallel > 1 else None
    return {
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.pipeline_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "optimizer_config": {
            "zero_one_enabled": master,
            # NxD's own clipping is off. The optimizer hook of the adapter (`Nxd._clip`) clips the
            # gradients by an fp32 norm in which each weight counts once.
            "grad_clipping": False,
        },
        # These values are set explicitly, since different versions of NxD derive them from
        # different keys.
        "mixed_precision_config": {
            "use_master_weights": master,
            "use_fp32_grad_acc": master,
            # HLAT set this option to False. A resume then lost the digits of master weights that
            # bf16 cannot represent.
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
    """Returns NxD's name of the last block of each pipeline stage except the last stage. All stages
    have equal numbers of blocks.
    """
    share = spec.num_layers // plan.pipeline_parallel
    return [f"model.layers.{share * stage - 1}" for stage in range(1, plan.pipeline_parallel)]


def needed_environment(plan: Plan, flags: str = "") -> dict[str, str]:
    """Returns the environment variables that the plan needs, as a dict from name to value. Without
    them, NxD would compute in another precision, or communicate between other ranks.

    `flags` are the compiler flags that are set already. If the plan needs another flag, the result
    contains `flags` with this flag added.
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
    """Returns the environment variables of a job, as a dict from name to value. On a cluster, the
    dict includes the values that HLAT tuned, from the site's profile for the ZeRO stage.

    Raises:
        ConfigError: The site is a cluster without this profile, so it has no Trainium devices.
    """
    if site.scheduler_settings is None:
        return needed_environment(plan)
    flags = site.scheduler_settings.environment.get(COMPILER, "")
    return site.profile(PROFILES[plan.zero_stage]) | needed_environment(plan, flags)


def check_neuron_environment(plan: Plan, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if the environment variables of this process differ from those that the
    plan needs. The message names each variable.

    HLAT saw training diverge in pure bf16 without stochastic rounding. Neither NxD nor the first
    steps of a loss curve would reveal this error.
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
    """Raises ConfigError if NxD does not support the model's grouped key/value heads on a platform,
    or if NxD places copies of these heads in another order than on Trn1.

    `kit.engines.neuron.weights` implements only the order of Trn1. `platform` is torch_neuronx's
    name of the platform, for example "trn1".
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
