"""Job scripts for the packaged sites, and warnings about the jobs."""

import re

import pytest

from cluster.render import nodes_for, render, scripts, warnings
from cluster.scheduler import quote
from cluster.site import Site
from tests.cluster.jobs import job_spec

FRONTIER = Site.load("frontier")
WITH_JOBS = "eks-trn1 frontier generic-gpu-slurm laptop lumi perlmutter trn1.32xlarge".split()


def job_on(site, num_nodes=2, per_node=None, run_dir="/fsx/run", **changes):
    size = {"num_processes": num_nodes * (per_node or site.devices_per_node)}
    given = {"num_nodes": num_nodes, "working_directory": "/fsx", **size, **changes}
    return job_spec(run_dir, "python", "-m", "kit.train", name="run", **given)


@pytest.mark.parametrize("name", WITH_JOBS)
def test_every_site_with_a_scheduler_renders_a_job(name):
    site = Site.load(name)
    job = job_on(site, num_nodes=1)
    assert render(job, site) == list(scripts(job, site).values())[-1]
    for text in (render(job, site), render(job_on(site, num_nodes=1, per_node=1), site)):
        assert not re.search(r"\b1 (nodes|ranks|pods|processes)\b", text)


CORES = "0xfe000000000000 0xfe00000000000000 0xfe0000 0xfe000000 0xfe 0xfe00 0xfe00000000 0xfe0000000000"  # noqa: E501


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (  # Sources: docs.lumi-supercomputer.eu, github.com/spyysalo/lumi-llm-scaling
            "lumi",
            [
                "#SBATCH --partition=standard-g",
                "#SBATCH --gpus-per-node=mi250:8",
                "#SBATCH --hint=nomultithread",
                "#SBATCH --mem=0",
                f"--cpu-bind=mask_cpu:{CORES.replace(' ', ',')}",
                "export FI_CXI_DEFAULT_CQ_SIZE=262144",
            ],
        ),
        (  # Source: docs.nersc.gov
            "perlmutter",
            [
                "#SBATCH --constraint=gpu\n",
                "#SBATCH --qos=regular",
                "#SBATCH --gpus-per-node=4",
                "#SBATCH --ntasks-per-node=4",
                "export NCCL_NET='AWS Libfabric'",
                "module load nccl",
            ],
        ),
    ],
)
def test_script_has_the_documented_lines_of_a_site(name, lines):
    site = Site.load(name)
    script = render(job_on(site), site)
    assert not [line for line in lines if line not in script]


def test_number_of_nodes_follows_from_devices():
    assert [nodes_for(devices, FRONTIER) for devices in (1, 8, 16, 3072)] == [1, 1, 2, 384]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"num_nodes": 16}, []),
        ({"num_nodes": 16, "time_limit_s": 6 * 3600}, ["6 h were asked", "gives 16 nodes 2 h"]),
        ({"num_nodes": 16, "time_limit_s": 300}, ["used up by the 600 s"]),
        ({"num_nodes": 2, "per_node": 6}, ["4 of the 16 devices"]),
    ],
    ids=["nothing", "time", "short", "idle devices"],
)
def test_questionable_job_gets_a_warning(job, words):
    job = job_on(FRONTIER, **job)
    told = warnings(job, FRONTIER)
    assert len(told) == bool(words) and all(word in told[0] for word in words)
    assert all(f"# WARNING: {line}" in render(job, FRONTIER) for line in told)


@pytest.mark.parametrize(
    ("nodes", "hours"), [(1, 2), (91, 2), (92, 6), (183, 6), (184, 12), (9472, 12)]
)
def test_frontier_time_limit_follows_walltime_bins(nodes, hours):
    """Frontier allows a longer walltime for more nodes. Source: scheduling policy in the Frontier
    User Guide.
    """
    assert f"#SBATCH --time={hours:02d}:00:00" in render(job_on(FRONTIER, nodes), FRONTIER)


def test_quoted_words_stay_on_one_line():
    assert quote("plain/word") == "plain/word"
    assert quote("a b") == "'a b'"
    assert quote("a'\\\nb") == "$'a\\'\\\\\\x0ab'"
