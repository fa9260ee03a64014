"""Builds the engine of a plan (`Engine` in engine.py), and checks whether the installed packages
and the site's devices can run this engine.
"""

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
    """Returns the engine that the plan names, for this rank.

    The process group must have `plan.num_devices` ranks, and `Plan.check` must have accepted the
    plan for the model. If `initialise` is False, the weights stay unset until a checkpoint is
    loaded. `document_end` is the token that ends a document. If it is given, the native engine
    restricts attention to tokens of the same document.

    Raises:
        ConfigError: The installed torch or the environment cannot run the plan.
        MissingPackageError: The engine's package is not installed or not supported.
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
    """Raises an error if the installed packages cannot run the plan's engine.

    Engine neuron is checked by an import of NxD: in a child process, or in this process if `here`
    is True. A training rank passes True, since it must not start a second process on its cores.

    Raises:
        MissingPackageError: The engine's package is not installed or not supported.
        ConfigError: The installed torch cannot run the plan's pipeline schedule.
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
    """Raises ConfigError if the installed torch cannot run the plan's pipeline schedule."""
    # Imported late, since the planner imports this module and needs no version.
    import importlib.metadata

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
    """Raises ConfigError if the plan's engine cannot train the model on the devices of the site."""
    device = site.device.name
    platform = site.device.trainium
    # A local site may be a Trainium host whose site file does not name the Trainium platform.
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
