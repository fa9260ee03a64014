"""On what the processes of this machine compute: its GPUs, where there is one for each, or its
CPU cores.
"""

from typing import Literal

from cluster.record import ConfigError, counted
from cluster.site import Device, Fact, Links, Site
from kit.config.plan import Plan

DeviceName = Literal["cpu", "cuda"]


def torch_device(site: Site) -> DeviceName:
    """Returns what torch calls the device of a site; `cuda` is also its name for AMD's GPUs."""
    return "cuda" if site.device.is_gpu else "cpu"


def on_device(site: Site, plan: Plan, device: DeviceName | None = None) -> Site:
    """Returns a site whose device is the one that the ranks of a plan compute on, so that MFU has
    the peak of that one.

    Without `device`, a local site stays what it is if it names a GPU or a peak is known; else it
    becomes this machine's GPUs where there is one for each rank (NCCL refuses more), or its CPU
    cores. What was known of another device is left out.

    Raises:
        ConfigError: the site is not this machine, or this machine has fewer GPUs than ranks.
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

    # The count alone may come from the driver's own library, though the driver is too old for
    # torch.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu() -> Device:
    import torch

    properties = torch.cuda.get_device_properties(0)
    memory = Fact(value=properties.total_memory, source=f"this machine: torch {torch.__version__}")
    return Device(name=f"{properties.name} (GPU)", memory_bytes=memory)
