"""Makes this rank join its process group, over gloo, NCCL or XLA. The environment variables RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe the group.
"""

import contextlib
import ctypes
import datetime
import os
import resource
import socket
import sys
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cluster.record import ConfigError, counted
from cluster.site import Site
from kit.engines.capabilities import EngineName
from kit.parallel.groups import COLLECTIVE_TIMEOUT, connect, cpu_group

JOIN_S_PER_RANK = datetime.timedelta(seconds=0.5)
"""Time limit for joining the process group, per rank of the group. With a fixed limit, every third
start of 10,992 ranks failed (Megatron-LM PR 1006)."""
LOOK_UP_S = 60.0
"""Seconds for which a rank retries to look up MASTER_ADDR by name. Without this limit, torch would
retry for up to twice the time limit for joining the process group."""
LOOK_UP_EVERY_S = 2.0
"""Seconds between two look-ups of MASTER_ADDR."""


def start_process_group(engine: EngineName = "native", site: Site | None = None) -> torch.device:
    """Joins this rank's process group and returns the device on which this rank computes. The
    group's backend is gloo on CPUs, gloo and NCCL on GPUs, and XLA for engine neuron.

    Raises:
        ConfigError: The site's device is a GPU, but no GPU is available to this rank.
        RuntimeError: MASTER_ADDR cannot be looked up, or a rank did not join in time.
    """
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        os.environ.setdefault(name, value)
    _prepare_for_connections()
    timeout = max(COLLECTIVE_TIMEOUT, JOIN_S_PER_RANK * int(os.environ["WORLD_SIZE"]))
    if os.environ["WORLD_SIZE"] != "1":
        check_address(os.environ["MASTER_ADDR"])
    if engine == "neuron":
        from kit.engines.neuron.adapter import start_xla_process_group

        return start_xla_process_group()
    if _has_gpu(site):
        # If the launcher makes only one GPU visible to each rank, this GPU has index 0 in the rank.
        # The modulo maps every LOCAL_RANK to this index.
        device = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        )
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **local_store(timeout)
        )
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        dist.init_process_group("gloo", timeout=timeout, **local_store(timeout))
    connect(dist.group.WORLD, "world", timeout)
    return device


def local_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Returns the arguments with which `init_process_group` uses a store that only this machine can
    reach. Returns {} if the ranks run on several machines or under torchrun, because torch then
    chooses the store.

    A single rank uses a store in its own memory, which needs no port. Torch's own store listens on
    all networks and accepts every client. The store for several local ranks therefore listens on
    127.0.0.1 only.
    """
    if os.environ["WORLD_SIZE"] == "1":
        alone: Any = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        return {"store": alone, "rank": 0, "world_size": 1}
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # On several machines, torch creates the rendezvous store. Under torchrun, torch connects to the
    # store that torchrun's agent has created. In both cases this function must not create a store.
    if address != "127.0.0.1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    listening = socket.create_server((address, port), backlog=world).detach() if rank == 0 else None
    store: Any = dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
        address, port, world, rank == 0, timeout, multi_tenant=True, master_listen_fd=listening
    )
    return {"store": store, "rank": rank, "world_size": world}


def check_address(address: str, limit_s: float = LOOK_UP_S) -> None:
    """Raises RuntimeError if this machine cannot look up the network name `address`, through which
    the ranks find each other.

    The look-up is repeated for up to `limit_s` seconds, since a name service may fail for a moment,
    and a new name may become known only after a while.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"Rank {os.environ['RANK']} on {socket.gethostname()} cannot look up"
                    f" MASTER_ADDR={address!r}, the address at which the ranks meet: {error}. Set"
                    " MASTER_ADDR to an address of the first node that all nodes reach (for Slurm"
                    " in site.slurm.task_setup)."
                ) from error
        time.sleep(LOOK_UP_EVERY_S)


def _has_gpu(site: Site | None) -> bool:
    """Returns whether this rank computes on a GPU. On a local site, the rank uses a GPU only if the
    site's device is a GPU, since MFU is computed with the peak FLOP/s of the site's device.
    """
    # `device_count` alone may ask the driver's library, which also counts GPUs whose driver is too
    # old for torch. Therefore `is_available` is called first.
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_local = site is not None and site.scheduler == "local"
    # A local site needs one GPU per rank. On a cluster, the scheduler may show each rank only its
    # own GPU, so one visible GPU is enough.
    needed = ranks if is_local else 1
    if site is not None and site.device.is_gpu and gpus < needed:
        raise ConfigError(
            f"site.device: {site.device.name!r} is a GPU, but torch {torch.__version__} sees {gpus}"
            f" here for {ranks} ranks. Check the driver and torch's wheel (`kit doctor`), start"
            " fewer ranks, or use CPU cores: `kit launch RUN --site laptop`."
        )
    on_cpu = site is not None and is_local and not site.device.is_gpu
    if gpus and on_cpu and os.environ["RANK"] == "0":
        print(
            f"WARNING: {counted(ranks, 'rank')}, {counted(gpus, 'GPU')} here: all ranks compute on"
            " the CPU, over gloo",
            flush=True,
        )
    return gpus > 0 and not on_cpu


def control_group() -> Any:
    """Returns the process group through which all ranks agree on the next action, for example a
    save or a stop. The group communicates CPU tensors, so its collectives never become part of a
    compiled graph.

    If the world's group has the backend gloo, this group is returned. Under XLA a new gloo group is
    made, since XLA's group has no CPU backend.
    """
    if "gloo" in dist.get_backend_config():
        return dist.group.WORLD
    return cpu_group("control")


def _prepare_for_connections() -> None:
    """Makes gloo connect two ranks only when they communicate, and raises this process's limit of
    open files and sockets to the highest allowed value.

    By default, gloo connects each rank with all other ranks, once per group. A limit of 1,024
    descriptors is then used up at 250 to 335 ranks. Above 1,000 ranks, reading all addresses from
    rank 0 takes longer than gloo waits (github.com/pytorch/gloo/issues/327 and 419).
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS reports a highest value that it does not accept.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the kernel. The setting lasts until
    this process ends.

    Each step allocates and frees the same large tensors. On a CPU, new memory pages for these
    tensors took a sixth of the time of a demo step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def leave(code: int) -> NoReturn:
    """Ends this process with exit code `code`, without Python's finalization. During finalization
    gloo's threads may release tensors, and torch 2.13 then aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
