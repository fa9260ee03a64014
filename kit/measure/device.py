"""Chooses the device on which the processes of a local run compute: GPUs of this machine if there
is one per process, and otherwise CPU cores.
"""

from typing import Literal

from cluster.record import ConfigError, counted
from cluster.site import Device, Fact, Links, Site
from kit.config.plan import Plan

DeviceName = Literal["cpu", "cuda"]


def torch_device(site: Site) -> DeviceName:
    """Returns torch's name for the device type of a site. For AMD GPUs this name is `cuda` too."""
    return "cuda" if site.device.is_gpu else "cpu"


def on_device(site: Site, plan: Plan, device: DeviceName | None = None) -> Site:
    """Returns the site with the device on which the ranks of a plan will compute. MFU is computed
    with the peak of this device.

    `device` is `cpu` or `cuda`, and is allowed for local sites only. If it is None, a local site
    keeps its device if this device is a GPU or has a known peak. Otherwise the device is the GPU of
    this machine if there is one GPU per rank, or else a CPU core. NCCL does not allow two ranks on
    one GPU. If the device changes, the numbers of the old device and its links are removed. Sites
    that are not local are returned unchanged.

    Raises:
        ConfigError: `device` is unknown, `device` is given and the site is not this machine, or
            this machine has fewer GPUs than ranks.
    """
    ranks = plan.num_devices
    is_here = site.scheduler == "local" and not plan.capabilities.runs_on_trainium
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device: {device!r} is not allowed. Give cpu or cuda.")
    if device is not None and not is_here:
        raise ConfigError(
            f"device: {device!r}: jobs of site {site.name!r} and engine {plan.engine!r} compute on"
            f" what the site has, {site.device.name!r}. Leave it out, or give another"
            " site."
        )
    if device is None and (site.device.is_gpu or site.device.peak_flops_per_s):
        device = torch_device(site)
    if not is_here or device == torch_device(site) == "cpu":
        return site
    gpus = 0 if device == "cpu" else _gpus()
    if device == "cuda" and gpus < ranks:
        raise ConfigError(
            f"device: {counted(ranks, 'rank')} of site {site.name!r} need a GPU each, and"
            f" torch sees {gpus} here. Check driver and wheel with `kit doctor`, start fewer ranks,"
            " or use site laptop, which then has CPU cores."
        )
    if (gpus >= ranks) == site.device.is_gpu:
        return site
    if gpus >= ranks:
        return site.replace(device=_gpu(), devices_per_node=gpus, links=Links())
    laptop = Site.load("laptop")
    return site.replace(
        device=laptop.device, devices_per_node=laptop.devices_per_node, links=Links()
    )


def _gpus() -> int:
    import torch

    # `device_count` may ask a library of the driver, and may count GPUs whose driver is too old for
    # torch. Therefore `is_available` is checked first.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    memory = Fact(value=properties.total_memory, source=f"this machine: torch {torch.__version__}")
    return Device(name=f"{properties.name} (GPU)", memory_bytes=memory)
