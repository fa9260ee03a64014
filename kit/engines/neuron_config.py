"""What a Plan is in the words of NeuronX Distributed (NxD): HLAT's two recipes. No torch.

Source: the released training scripts of HLAT (github.com/awslabs/HLAT, 7b/ and 70b/), arXiv 2404.10630 section VI.
"""

from collections.abc import Mapping
from typing import Any

from cluster.record import ConfigError
from cluster.site import Site
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec

PROFILES = {0: "hlat-7b", 1: "hlat-70b"}
"""The site's set of environment variables for a ZeRO stage: pure bf16 with stochastic rounding, or mixed precision."""
PRECISION = {
    0: {"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": "0", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"},
    1: {"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"},
}
"""Variables without which the same calls compute in another precision. With XLA_DOWNCAST_BF16, torch's float is bf16
on the device and its double fp32; with XLA_USE_BF16, both are bf16."""


def nxd_arguments(spec: ModelSpec, plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Returns the arguments of `neuronx_distributed_config` that are plain values; the engine adds classes.

    Raises:
        ConfigError: the recipe clips no gradients, so NxD would not tell their norm.
    """
    if recipe.gradient_clip is None:
        raise ConfigError(
            "recipe.gradient_clip: null is not allowed with engine 'neuron', which tells a gradient norm only where it "
            "clips by it. HLAT clips at 1.0; a large number clips nothing."
        )
    master = plan.zero_stage == 1
    return {
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.pipeline_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "optimizer_config": {
            "zero_one_enabled": master,
            "grad_clipping": True,
            "max_grad_norm": recipe.gradient_clip,
        },
        # Written out, though NxD would derive them: its defaults have followed other keys from version to version.
        "mixed_precision_config": {
            "use_master_weights": master,
            "use_fp32_grad_acc": master,
            "use_master_weights_in_ckpt": False,
        },
        "pipeline_config": _pipeline(spec, plan) if plan.pipeline_parallel > 1 else None,
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
    """Returns the last block of every pipeline stage but the last, in equal shares, as NxD names them."""
    share = spec.num_layers // plan.pipeline_parallel
    return [f"model.layers.{share * stage - 1}" for stage in range(1, plan.pipeline_parallel)]


def job_environment(plan: Plan, site: Site) -> dict[str, str]:
    """Returns the variables that a job needs for the plan's precision, and what HLAT tuned beside them, from its site.

    Raises:
        ConfigError: the site is a cluster without such a profile, so not one of Trainium.
    """
    if site.scheduler == "local":
        return PRECISION[plan.zero_stage]
    return site.profile(PROFILES[plan.zero_stage])


def check_environment(plan: Plan, environment: Mapping[str, str]) -> None:
    """Returns nothing if the variables of this process give the plan's precision: HLAT saw pure bf16 without
    stochastic rounding diverge, and neither NxD nor a loss curve's first steps would tell.

    Raises:
        ConfigError: a variable is not set, or is another; each is named.
    """
    wanted = PRECISION[plan.zero_stage]
    found = {name: environment.get(name, "not set") for name in wanted}
    wrong = [f"{name} is {value}" for name, value in found.items() if value != wanted[name]]
    if wrong:
        needed = " ".join(f"{name}={value}" for name, value in wanted.items())
        raise ConfigError(
            f"plan.precision: 'bf16' with zero_stage {plan.zero_stage} on engine 'neuron' needs {needed}, but "
            f"{', '.join(wrong)}. Launch on a Trainium site: its profile {PROFILES[plan.zero_stage]!r} sets them."
        )
