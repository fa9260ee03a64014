"""Engines: what runs one optimizer step of a Plan. Each is an `Engine` (engine.py)."""

import importlib.metadata
from typing import TYPE_CHECKING

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.neuron.configuration import check_platform
from kit.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kit.engines.engine import Engine


def build_engine(
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    device: "torch.device",
    *,
    initialise: bool = True,
    document_end: int | None = None,
) -> "Engine":
    """Returns the engine that the plan names, of a process group of `plan.num_devices` ranks, which
    `Plan.check` has passed for the model.

    Without `initialise` weights stay unset, to be filled from a checkpoint. With `document_end`, no
    token of the native engine looks back behind that token.

    Raises:
        ConfigError: the installed torch has not what the plan asks of it.
        MissingPackageError: the engine's package is not installed.
    """
    check_engine(plan, here=True)
    if plan.engine == "native":
        from kit.engines.native import NativeEngine

        engine = NativeEngine(spec, plan, recipe, device, initialise=initialise)
        if document_end is not None:
            engine.mask_documents(document_end)
        return engine
    if plan.engine == "deepspeed":
        from kit.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, plan, recipe, device, initialise=initialise)
    from kit.engines.neuron.engine import NeuronEngine

    return NeuronEngine(spec, plan, recipe, device, initialise=initialise)


def check_engine(plan: Plan, *, here: bool = False) -> None:
    """Raises MissingPackageError if the plan's engine cannot be started with what is installed,
    ConfigError if the installed torch has not what the plan asks of it.

    NxD is imported: in another process, or `here`, by a rank.
    """
    if plan.engine == "native" and plan.pipeline_parallel > 1:
        _check_pipeline(plan)
    if plan.engine == "neuron":
        from kit.engines.neuron.probe import require_nxd

        require_nxd(here=here)
    if plan.engine == "deepspeed":
        from kit.engines.deepspeed.package import require_deepspeed

        require_deepspeed()


def _check_pipeline(plan: Plan) -> None:
    """Raises ConfigError if the installed torch cannot run the schedule of the plan."""
    torch_version = importlib.metadata.version("torch")
    release = tuple(map(int, torch_version.split(".")[:2]))
    if plan.schedule == "zbv" and release < (2, 13):
        raise ConfigError(
            f"plan.schedule: 'zbv' does not run on torch {torch_version}. Use schedule '1f1b',"
            " 'interleaved' or 'zero_bubble', or torch 2.13 or later."
        )
    is_single = plan.schedule in ("gpipe", "1f1b")
    if is_single and plan.num_microbatches < plan.num_stages and release < (2, 11):
        raise ConfigError(
            f"plan.num_microbatches: {plan.num_microbatches} is less than the {plan.num_stages}"
            f" stages of the pipeline, which torch {torch_version} does not run. Use a larger"
            " plan.global_batch_size, a smaller plan.micro_batch_size, fewer stages, or torch 2.11"
            " or later."
        )


def check_site(spec: ModelSpec, plan: Plan, site: Site) -> None:
    """Raises ConfigError if the plan's engine does not train such a model on the devices of a
    site.
    """
    device = site.device.name
    platform = site.device.trainium
    # On a Trainium host itself, that is a local site, no file need say so.
    elsewhere = site.device.is_gpu or (platform is None and site.scheduler != "local")
    if plan.engine == "neuron" and elsewhere:
        raise ConfigError(
            "plan.engine: 'neuron' trains on AWS Trainium alone, and a device of site"
            f" {site.name!r} is {device!r}. Use plan.engine=native, or a Trainium site such as"
            " 'trn1.32xlarge'."
        )
    if plan.engine != "neuron" and platform is not None:
        raise ConfigError(
            f"plan.engine: {plan.engine!r} trains on GPUs and CPU cores, and a device of site"
            f" {site.name!r} is {device!r}. Use plan.engine=neuron, or another site."
        )
    if platform is not None:
        check_platform(plan, spec, platform)
