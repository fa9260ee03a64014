"""`python -m kit.train --run DIR`: the command that every rank runs, whichever launcher starts it.
The training loop is `kit.trainer.loop`.

Ranks find each other by the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT.
"""

import argparse
import contextlib
import functools
import getpass
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from cluster.directory_handle import RunDirectory, retry_disk
from cluster.files import ignore_output_errors, is_private, write_atomic
from cluster.interpreter import source_command
from cluster.record import ConfigError, counted
from cluster.shadows import find_shadowing_modules
from cluster.state import JobError, JobState, log_path, read_state, update_state
from kit.data.wheels import file_sha256
from kit.engines import gpu
from kit.engines.process_group import leave, start_process_group
from kit.errors import DataError, MissingPackageError, RunError
from kit.parallel.groups import final_barrier
from kit.run import HOOK, Run
from kit.trainer.loop import Trainer


def main(arguments: list[str] | None = None) -> int:
    """Runs one rank and returns its exit code. An error that the user can correct is printed
    without a traceback.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run directory")
    directory = Path(parser.parse_args(arguments).run)
    ignore_output_errors()
    # FSDP2 warns that the local shard of tensor parallel logits is a view, which must not be
    # changed in place. The kit never changes it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    # torch.compile and other libraries start Python by `python -c`, which would import modules from
    # the working directory first.
    os.environ["PYTHONSAFEPATH"] = "1"
    use_own_compile_cache()
    try:
        _train(Run.open(directory), int(os.environ.get("KIT_ATTEMPT", "1")))
        return 0
    except (ConfigError, DataError, RunError, JobError, MissingPackageError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # This code tells the supervisor that a retry would fail in the same way.
        code = os.EX_CONFIG
    except Exception as error:
        traceback.print_exc()
        code = 1
        if gpu.is_out_of_memory(error):
            # A child process computes the advice, because a rank does not import the planner and
            # because the computation may fail. The advice is the last output of this rank.
            advice = source_command("kit.estimate.choose.memory_advice", str(directory))
            subprocess.run(advice, stdout=sys.stderr.fileno())
            code = os.EX_CONFIG  # A retry would run out of memory again.
    # The process exits without cleanup. To destroy the process group would mean to wait for ranks
    # that have not failed.
    os._exit(code)


def use_own_compile_cache() -> None:
    """Sets TORCHINDUCTOR_CACHE_DIR, unless it is set, to a folder in which only this user can
    write.

    torch.compile runs programs from this folder, so another user must not be able to write in it.
    The default folder, /tmp/torchinductor_USER, may have been created by another user. In this case
    a new folder is created.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # In a container, a user id may have no user name.
        user = f"uid_{os.getuid()}"
    folder = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="torchinductor_"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _train(run: Run, attempt: int) -> None:
    """Joins the process group, trains, and leaves the process group."""
    run.plan.check(run.spec, int(os.environ.get("WORLD_SIZE", "1")))
    gpu.set_environment(log_path(run.directory, attempt, 0).parent)
    ranks = counted(int(os.environ.get("WORLD_SIZE", "1")), "rank")
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    # `neuron_parallel_compile` sets this variable when it runs a command only to compile its
    # graphs. Such a command is no attempt of the run, and writes nothing into the run directory.
    is_compiling = run.plan.capabilities.runs_on_trainium and bool(
        os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY")
    )
    if not is_compiling:
        _record_phase(run, attempt, f"rank 0 waits until all of {ranks} have joined at {place}")
    device = start_process_group(run.plan.engine, run.site)
    if is_compiling:
        from kit.engines.neuron.engine import record_graphs

        print(record_graphs(run, device), flush=True)
        return
    gpu.choose_kernels(device, run.plan)
    joined = f"{ranks} joined; building the model and loading its checkpoint"
    _record_phase(run, attempt, joined, has_joined=True)
    if dist.get_rank() == 0:
        _record_attempt(run, attempt, device)
    # On Trainium the check is left out, since every size of a matrix product would be compiled
    # first.
    if not run.plan.capabilities.runs_on_trainium:
        _check_nodes(run, device)
    trainer = Trainer(run, attempt=attempt, device=device)
    _record_phase(run, attempt, "the first step runs, which may compile kernels", has_joined=True)
    reason = trainer.train()
    if dist.get_rank() == 0:
        print(reason, flush=True)
    final_barrier()
    # NxD finishes its checkpoints when Python ends, and needs the process group for this.
    if not run.plan.capabilities.runs_on_trainium:
        dist.destroy_process_group()


def _record_phase(run: Run, attempt: int, reason: str, *, has_joined: bool = False) -> None:
    """Writes what the attempt currently does before its first step, `reason`, into state.json. Only
    rank 0 writes.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    state = read_state(run.directory)
    # Without a launcher, this attempt has no state.json. None is created, since no supervisor would
    # write the final state.
    if state is None or state.attempt != attempt or state.state is not JobState.STARTING:
        return
    with _continues_without(run.directory / "state.json"):
        update_state(
            run.directory,
            attempt=attempt,
            reason=reason,
            has_joined=has_joined,
            heartbeat=time.time(),
        )


@contextlib.contextmanager
def _continues_without(file: Path) -> Iterator[None]:
    """Context manager that reports an error when a file of the run directory is written, and
    continues. Training needs none of these files.
    """
    try:
        yield
    except OSError as error:
        print(f"WARNING: {file} was not written: {error}", file=sys.stderr, flush=True)


def _check_nodes(run: Run, device: torch.device) -> None:
    """If a run has several nodes, measures the speed of each node, names slow nodes, and writes the
    measurements into node_check.json. Does nothing on a single node.
    """
    ranks = dist.get_world_size()
    if ranks == int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
        return
    from kit.measure.node_check import measure_nodes, record_nodes

    report = measure_nodes(device, run.plan.precision)
    if dist.get_rank() == 0:
        with _continues_without(run.directory / "node_check.json"):
            record_nodes(report, run.directory)


def _record_attempt(run: Run, attempt: int, device: torch.device) -> None:
    """Writes the plan and site of this attempt into the run directory, and env.json with versions,
    host, git commit and kernels.
    """
    import json

    home = RunDirectory(run.directory)
    for record, name in ((run.plan, "plan"), (run.site, "site")):
        # MFU of past steps is computed from the plan and site of their attempt.
        file = run.directory / f"{name}.attempt_{attempt:02d}.json"
        with _continues_without(file):
            retry_disk(functools.partial(record.write, file), home)
    # git must not lock its index. If the rank is killed during the command, the lock would stay.
    git = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = told.stdout.strip() or None
    except FileNotFoundError:  # A container may have no git.
        commit = None
    try:
        kit_version = version("pretraining-notebook-kit")
    except PackageNotFoundError:  # A source tree on PYTHONPATH has a git commit but no version.
        kit_version = None
    hook = run.directory / HOOK
    hook_sha256 = None
    if run.recipe.hook and hook.exists():
        hook_sha256 = file_sha256(hook)
    accelerator = torch.cuda.get_device_name() if device.type == "cuda" else None
    facts = {
        "attempt": attempt,
        "hook_sha256": hook_sha256,
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kit": kit_version,
        "git": commit,
        "shadowed_modules": {shadow.name: shadow.folder for shadow in find_shadowing_modules()},
        "accelerator": accelerator,
    }
    if not run.plan.capabilities.runs_on_trainium:
        facts |= gpu.chosen_kernels(run.spec, run.plan, device)
        if device.type == "cuda" and facts["attention"] == "MATH":
            print(
                "WARNING: no fused kernel takes this attention: its scores are written out, and"
                " slow",
                flush=True,
            )
    with _continues_without(run.directory / "env.json"):
        write_atomic(run.directory / "env.json", json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    code = main()
    if "torch_xla" in sys.modules:  # NxD finishes its checkpoints during a normal exit of Python.
        sys.exit(code)
    leave(code)
