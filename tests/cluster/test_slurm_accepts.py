"""A real Slurm reads the scripts of all sites, and starts one whose names and paths are as nasty
as Slurm allows.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import slurm
from cluster.job import Job, JobSpec
from cluster.render import scripts
from cluster.sandbox import Sandbox, stop, why_not
from cluster.scheduler import Compilation
from cluster.site import Site
from cluster.state import JobState

REPORT = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['VALUE'], os.environ['RANK'],"
    " os.getcwd()]))"
)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("slurm")
    try:
        yield Sandbox.start(root, isolated=False)
    finally:
        stop(root)


@pytest.fixture
def as_client(sandbox, monkeypatch):
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)


def done(job: JobSpec, site: Site) -> Job:
    """Returns a job that was sent to Slurm and has ended well."""
    submitted = slurm.submit(job, site)
    status = submitted.wait(120)
    assert status.state is JobState.DONE, (
        status,
        [log.read_text() for log in submitted.run_dir.glob("logs/slurm*")],
    )
    return submitted


@pytest.mark.parametrize(
    "name", ["frontier", "generic-gpu-slurm", "lumi", "perlmutter", "trn1.32xlarge"]
)
def test_slurm_understands_the_directives_of_each_site(as_client, tmp_path, name):
    site = Site.load(name)
    assert site.slurm is not None
    # What this cluster does not have: accounts, features, GPUs, so many cores.
    table = site.slurm.replace(account=None, partition="batch", qos=None, constraint=None)
    site = site.replace(slurm=table.replace(gpus_per_node=None, cpus_per_task=1))
    (tmp_path / "logs").mkdir()
    job = JobSpec(
        name=name,
        run_dir=str(tmp_path),
        argv=("true",),
        num_processes=2,
        num_nodes=2,
        time_limit_s=3600,
    )
    for file_name, text in scripts(job, site).items():
        (tmp_path / file_name).write_text(text)
        tested = subprocess.run(
            ["sbatch", "--test-only", file_name], cwd=tmp_path, capture_output=True, text=True
        )
        assert tested.returncode == 0 and "to start at" in tested.stderr, tested.stderr


def test_hostile_names_and_paths_go_through_a_real_slurm(sandbox, as_client, tmp_path):
    run_dir = tmp_path / 'it\'s $(touch canary)\n`x` é "q" * ;&|'
    run_dir.mkdir()
    job = JobSpec(
        name="a; $(touch canary) 'b' é",
        run_dir=str(run_dir),
        working_directory=str(run_dir),
        argv=(sys.executable, "-c", REPORT, "$(touch canary)\n'", ""),
        num_processes=4,
        num_nodes=2,
        environment={"VALUE": "`touch canary`\r\n\u202e"},
    )
    submitted = done(job, Site.load(sandbox.site_file))
    for rank in range(4):
        argv, value, number, cwd = json.loads(submitted.logs(rank))
        assert argv == ["$(touch canary)\n'", ""] and value == "`touch canary`\r\n\u202e"
        assert (number, Path(cwd)) == (str(rank), run_dir)
    assert not list(tmp_path.rglob("canary*"))


def test_agent_of_each_node_starts_its_ranks(sandbox, as_client, tmp_path):
    """torchrun, as Trainium wants it: its agents meet, every rank gets its number, log and a
    deaf ear for SIGTERM.
    """
    code = (
        "import os, signal; deaf = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN;"
        " print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE',"
        " 'LOCAL_WORLD_SIZE')), deaf)"
    )
    site = Site.load(sandbox.site_file)
    assert site.slurm is not None
    site = site.replace(slurm=site.slurm.replace(launcher="torchrun"))
    job = JobSpec(
        name="agents",
        run_dir=str(tmp_path / "run"),
        argv=(sys.executable, "-c", code),
        num_processes=4,
        num_nodes=2,
        working_directory=str(tmp_path),
    )
    submitted = done(job, site)
    assert [submitted.logs(rank) for rank in range(4)] == [
        f"{rank} {rank % 2} 4 2 True\n" for rank in range(4)
    ]


def test_run_waits_for_its_compile_job_and_finds_the_cache(sandbox, as_client, tmp_path):
    code = (
        "import os, pathlib; cache = pathlib.Path(os.environ['CACHE']); "
        "cache.joinpath('graph').write_text('compiled') if 'COMPILING' in os.environ else "
        "print(cache.name, cache.joinpath('graph').read_text())"
    )
    site = Site.load(sandbox.site_file)
    assert site.slurm is not None
    compilation = Compilation(
        command=("env", "COMPILING=1"),
        variable="CACHE",
        shared_cache=str(tmp_path / "shared"),
        node_cache=str(tmp_path / "disk"),
    )
    site = site.replace(slurm=site.slurm.replace(compilation=compilation))
    # One node: those of this sandbox share a disk, and would copy into the same folder at once.
    job = JobSpec(
        name="chain",
        run_dir=str(tmp_path / "run"),
        argv=(sys.executable, "-c", code),
        num_processes=2,
        num_nodes=1,
        working_directory=str(tmp_path),
    )
    submitted = done(job, site)
    assert submitted.logs(0) == "disk compiled\n"
