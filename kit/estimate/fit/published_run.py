"""Record of one published run (`PublishedRun`), measured or out of memory, and the site of its
machine. No torch.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from cluster.record import field_doc
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.theory.layouts import Layouts, transformer_engine


class Basis(enum.Enum):
    """FLOP count behind the published FLOP/s of a row."""

    MODEL = "model"
    """Model FLOPs: `FlopBasis.MODEL`."""
    HARDWARE = "hw"
    """Model FLOPs and recomputation: `FlopBasis.MEGATRON_RECOMPUTE`."""
    NEOX = "neox"
    """6 N + 60 L h s FLOPs per token with N parameters, L layers, hidden size h and sequence length
    s. This counts attention five times."""
    NONE = "none"
    """The row has no published FLOP/s."""
    UNKNOWN = "unknown"
    """The source does not state the FLOP count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published run: a model, a layout, and the measured step time or an out-of-memory
    label.
    """

    source: str = field_doc("paper, repository or log")
    system: str = field_doc("name of the machine in the source")
    device: str = field_doc("name of the accelerator, of which each rank has one")
    stack: str = field_doc(
        "software stack and machine, whose runs share one time factor", default=""
    )
    kind: Literal["measured", "oom"] = field_doc(
        "a step time, or an out-of-memory label", default="measured"
    )
    status: str = field_doc(
        "origin of the numbers: read, mixed, derived, recalled or secondary", default="read"
    )
    basis: Basis = field_doc("FLOP count behind the published FLOP/s", default=Basis.UNKNOWN)
    precision: str = field_doc("format of the matrix products", default="bf16")
    peak_flops_per_s: float | None = field_doc(
        "peak FLOP/s of one device in bf16, according to the source", default=None
    )
    spec: ModelSpec = field_doc("shapes of the model")
    plan: Plan = field_doc("layout and batch. Its precision is always bf16")
    flash_attention: int = field_doc(
        "generation of fused attention, 1 or 2. 0: scores are written to memory", default=2
    )
    fused_norm: bool = field_doc("norm and rotary kernels are fused", default=True)
    fused_softmax: bool = field_doc(
        "mask and softmax are one kernel, if scores are written to memory", default=True
    )
    data_overlap: bool = field_doc(
        "reduction of gradients and gathering of weights overlap with computation", default=False
    )
    tensor_overlap: bool = field_doc(
        "collectives of tensor parallelism overlap with computation", default=False
    )
    gradient_bytes: float = field_doc("bytes of one reduced gradient", default=2.0)
    offloaded_layers: int = field_doc(
        "number of layers whose activations are offloaded to host memory", default=0
    )
    step_time_s: float | None = field_doc(
        "seconds per optimizer step. None for an out-of-memory run", default=None
    )
    memory_bytes: float | None = field_doc(
        "largest allocated bytes on a device. None if the source does not state them", default=None
    )
    is_derived: bool = field_doc(
        "the step time was computed from a rate published as a headline, or for another run",
        default=False,
    )
    assumed: tuple[str, ...] = field_doc(
        "fields that the source does not state, with assumed values", default=()
    )
    note: str = field_doc("further statements of the source", default="")

    @property
    def num_devices(self) -> int:
        """Number of devices of the plan."""
        return self.plan.num_devices

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of one global batch."""
        return self.plan.global_batch_size * self.spec.sequence_length

    @property
    def has_blocks(self) -> bool:
        """Whether the device of the run supports block-scaled formats such as mxfp8."""
        site = self.site()
        return site is not None and "mxfp8" in site.device.peak_flops_per_s

    def flops_per_s(self, basis: FlopBasis = FlopBasis.MODEL) -> float | None:
        """Returns FLOP/s of one device, computed from the measured step time with a FLOP count.
        None for an out-of-memory run.
        """
        if self.step_time_s is None:
            return None
        return (
            self.tokens_per_step
            * self.spec.flops_per_token(basis)
            / (self.step_time_s * self.num_devices)
        )

    def layouts(self) -> Layouts:
        """Returns the run as Layouts of length one."""
        return layouts([self])

    def site(self) -> Site | None:
        """Returns the packaged site of the run's machine, or a packaged site with its kind of
        device, or None if there is neither.
        """
        return _site(self.source, self.system, self.device)


SAID = (
    "flash_attention",
    "fused_norm",
    "fused_softmax",
    "data_overlap",
    "tensor_overlap",
    "gradient_bytes",
    "offloaded_layers",
)
"""Fields of PublishedRun that are columns of Layouts."""


def layouts(runs: Sequence[PublishedRun]) -> Layouts:
    """Returns the runs as Layouts, one element per run.

    The column `native` is false. Runs in formats below bf16 are taken to use Transformer Engine.
    """
    kernels = {name: [getattr(run, name) for run in runs] for name in SAID}
    narrow = [transformer_engine(run.precision, run.has_blocks) for run in runs]
    kernels |= {name: [each[name] for each in narrow] for name in narrow[0]}
    plans = [run.plan for run in runs]
    return Layouts.of([run.spec for run in runs], plans, native=False, **kernels)


def step_times(runs: Iterable[PublishedRun]) -> np.ndarray:
    """Returns measured seconds per step, one element per run. NaN for out-of-memory runs."""
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
}
"""Name of the packaged site of each machine, by the name of the machine in its source."""
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
"""(beginning of a device's name, name of a packaged site), for machines that are not in SYSTEMS."""


@functools.cache
def _site(source: str, system: str, device: str) -> Site | None:
    name = SYSTEMS.get(system) or ("aleph-alpha" if source.startswith("Aleph Alpha") else None)
    short = device.replace(" ", "").replace("-", "")
    for vendor in ("NVIDIA", "AMD", "Instinct", "Intel"):
        short = short.removeprefix(vendor)
    name = name or next((site for prefix, site in DEVICES if short.startswith(prefix)), None)
    return Site.load(name) if name else None
