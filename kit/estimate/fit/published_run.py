"""Record of one published run (`PublishedRun`) with a measured step time or an out-of-memory label,
and the site file for its machine. This module does not import torch.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from cluster.record import field_doc
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.theory.layouts import KERNELS, Layouts, cast_bytes, transformer_engine


class Basis(enum.Enum):
    """Formula with which a publication counted FLOPs to compute its FLOP/s."""

    MODEL = "model"
    """FLOPs without recomputation were counted (`FlopBasis.MODEL`)."""
    HARDWARE = "hw"
    """FLOPs including recomputation were counted (`FlopBasis.MEGATRON_RECOMPUTE`)."""
    NEOX = "neox"
    """6 N + 60 L h s FLOPs per token with N parameters, L layers, hidden size h and sequence length
    s. This formula of GPT-NeoX counts attention five times."""
    NONE = "none"
    """The publication states no FLOP/s for the run."""
    UNKNOWN = "unknown"
    """The publication states FLOP/s, but not how FLOPs were counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published training run: the model, the layout, and a measured step time or a label that
    the run ran out of memory.
    """

    source: str = field_doc("paper, repository or log in which the run was published")
    system: str = field_doc("name of the machine, as the source writes it")
    device: str = field_doc("name of the accelerator. Each rank has one")
    stack: str = field_doc(
        "name of the software stack and the machine. Runs with equal names share a time factor",
        default="",
    )
    kind: Literal["measured", "oom"] = field_doc(
        "measured: the run has a step time. oom: the run ran out of memory", default="measured"
    )
    status: str = field_doc(
        "origin of the numbers: read, mixed, derived, recalled or secondary", default="read"
    )
    basis: Basis = field_doc(
        "formula with which the source counted FLOPs for its FLOP/s", default=Basis.UNKNOWN
    )
    precision: str = field_doc("number format of the matrix products", default="bf16")
    peak_flops_per_s: float | None = field_doc(
        "peak FLOP/s of one device in bf16, according to the source", default=None
    )
    spec: ModelSpec = field_doc("shapes of the model")
    plan: Plan = field_doc("layout and batch. Its precision is always bf16")
    flash_attention: int = field_doc(
        "generation of fused attention, 1 or 2. 0: attention scores are written to memory",
        default=2,
    )
    fused_norm: bool = field_doc(
        "whether norm and rotary embedding run as fused kernels", default=True
    )
    fused_softmax: bool = field_doc(
        "whether mask and softmax are one kernel. Has an effect only if attention scores are"
        " written to memory",
        default=True,
    )
    data_overlap: bool = field_doc(
        "whether reducing gradients and gathering weights overlap with computation", default=False
    )
    tensor_overlap: bool = field_doc(
        "whether collectives of tensor parallelism overlap with computation", default=False
    )
    gradient_bytes: float = field_doc(
        "bytes of one gradient when replicas reduce their gradients", default=2.0
    )
    code_base: str = field_doc(
        "name of the training code in TORCH_CODE_BASES. Empty: no plain torch code", default=""
    )
    compiled: bool = field_doc("whether torch.compile compiled the blocks", default=False)
    offloaded_layers: int = field_doc(
        "number of layers whose activations are offloaded to host memory", default=0
    )
    step_time_s: float | None = field_doc(
        "seconds per optimizer step. If the run ran out of memory, None", default=None
    )
    memory_bytes: float | None = field_doc(
        "largest number of allocated bytes on a device. If the source does not state it, None",
        default=None,
    )
    is_derived: bool = field_doc(
        "whether the step time was computed from a rate published as a headline or for another run",
        default=False,
    )
    assumed: tuple[str, ...] = field_doc(
        "names of fields that the source does not state, so that usual values are assumed",
        default=(),
    )
    note: str = field_doc("further statements of the source", default="")

    @property
    def num_devices(self) -> int:
        """Number of devices on which the run trained, one per rank."""
        return self.plan.num_devices

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one optimizer step (global batch size times sequence length)."""
        return self.plan.global_batch_size * self.spec.sequence_length

    @property
    def has_blocks(self) -> bool:
        """Whether the device of the run supports block-scaled formats such as mxfp8."""
        site = self.site()
        return site is not None and "mxfp8" in site.device.peak_flops_per_s

    def flops_per_s(self, basis: FlopBasis = FlopBasis.MODEL) -> float | None:
        """Returns the FLOP/s of one device, computed from the measured step time. `basis` decides
        which FLOPs are counted. If the run ran out of memory, the result is None.
        """
        if self.step_time_s is None:
            return None
        return (
            self.tokens_per_step
            * self.spec.flops_per_token(basis)
            / (self.step_time_s * self.num_devices)
        )

    def layouts(self) -> Layouts:
        """Returns the model and the plan of the run as a `Layouts` object with one layout."""
        return layouts([self])

    def site(self) -> Site | None:
        """Returns the site of the run's machine from the site files of the kit. If there is none,
        returns a site with the same kind of device, or None.
        """
        return _site(self.source, self.system, self.device)


STATED_FIELDS = (
    "flash_attention",
    "fused_norm",
    "fused_softmax",
    "data_overlap",
    "tensor_overlap",
    "gradient_bytes",
    "compiled",
    "offloaded_layers",
)
"""Fields of PublishedRun that are copied into columns of Layouts of equal name. These fields
describe kernels, overlap of communication with computation, and offload of activations."""
TORCH_CODE_BASES: dict[str, dict[str, Any]] = {
    "kempnerforge": {"separate_inputs": True, "gathers_logits": True, "reduces_once": True},
    "olmo-core": {},
    "torchtitan": {"recomputed_products": 0.5},
}
"""Maps the name of training code in plain torch (FSDP2, DTensor, torch.compile) to the columns of
Layouts in which it differs from the kit's engine.

KempnerForge splits queries, keys, values, gate and up with separate `ColwiseParallel` styles,
gathers the logits (`kempnerforge/distributed/tensor_parallel.py`), and reduces gradients in the
last micro-batch of a step (`kempnerforge/training/grad.py`). torchtitan's selective recomputation
saves every second matrix product (`torchtitan/models/llama3/parallelize.py`, 2024)."""


def layouts(runs: Sequence[PublishedRun]) -> Layouts:
    """Returns the models and plans of the runs as one `Layouts` object, with one layout per run.

    Column `native` is True for the code of TORCH_CODE_BASES. Runs of other code in number formats
    narrower than bf16 are assumed to use Transformer Engine.
    """
    kernels = {name: [getattr(run, name) for run in runs] for name in STATED_FIELDS}
    formats = [
        {"cast_bytes": cast_bytes(run.precision, is_native=True)}
        if run.code_base
        else transformer_engine(run.precision, run.has_blocks)
        for run in runs
    ]
    traits = [TORCH_CODE_BASES.get(run.code_base, {}) for run in runs]
    for stated in (formats, traits):
        for name in dict.fromkeys(name for each in stated for name in each):
            kernels[name] = [each.get(name, KERNELS[name]) for each in stated]
    kernels["native"] = [run.code_base != "" for run in runs]
    plans = [run.plan for run in runs]
    return Layouts.of([run.spec for run in runs], plans, **kernels)


def measured_step_seconds(runs: Iterable[PublishedRun]) -> np.ndarray:
    """Returns the measured seconds per step, with one element per run. The element of a run that
    ran out of memory is NaN.
    """
    return np.array([np.nan if run.step_time_s is None else run.step_time_s for run in runs])


SYSTEMS = {
    "Selene": "selene",
    "KAIST A100 cluster": "kaist",
    "KAIST A100 node": "kaist",
    "Jean Zay": "jean-zay",
    "Frontier": "frontier",
    "LUMI": "lumi",
    "Aurora": "aurora",
    "trn1.32xlarge": "trn1.32xlarge",
    "DGX-H100": "dgx-h100",
    "Eos-class H100": "dgx-h100",
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
    "Kempner H200": "kempner-h200",
    "Grand Teton H100": "grand-teton-h100",
}
"""Maps the name of a machine in a publication to the name of the site file for this machine in the
kit."""
DEVICES = (
    ("A100", "selene"),
    ("MI250", "frontier"),
    ("Trainium", "trn1.32xlarge"),
    ("H100", "dgx-h100"),
    ("TPUv4", "tpu-v4"),
    ("H200", "hgx-h200"),
    ("H800", "dgx-h100"),
    ("GH200", "dgx-h100"),
    ("GB200", "gb200-nvl72"),
    ("B200", "hgx-b200"),
    ("GB300", "gb300-nvl72"),
    ("B300", "hgx-b300"),
    ("MI300X", "mi300x"),
    ("MI325X", "mi325x"),
    ("MI350X", "mi350x"),
    ("MI355X", "mi355x"),
    ("Gaudi2", "gaudi2"),
)
"""(beginning of a device's name, name of a site file of the kit with this kind of device). The
first match is used for machines that are not in SYSTEMS."""


@functools.cache
def _site(source: str, system: str, device: str) -> Site | None:
    name = SYSTEMS.get(system) or ("aleph-alpha" if source.startswith("Aleph Alpha") else None)
    short = device.replace(" ", "").replace("-", "")
    for vendor in ("NVIDIA", "AMD", "Instinct", "Intel"):
        short = short.removeprefix(vendor)
    name = name or next((site for prefix, site in DEVICES if short.startswith(prefix)), None)
    return Site.load(name) if name else None
