"""What a site can hold, what it warns of, and what is refused in a site file and a job, each
with the way out.
"""

import re

import pytest

from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.render import check_submittable, nodes_for, render, scripts, warnings
from cluster.scheduler import Slurm, quote
from cluster.site import Site

WITH_JOBS = [
    "eks-trn1",
    "frontier",
    "generic-gpu-slurm",
    "laptop",
    "lumi",
    "perlmutter",
    "trn1.32xlarge",
]


def job_on(site, num_nodes=2, per_node=None, **changes):
    per_node = per_node or site.devices_per_node
    given = dict(
        name="run",
        run_dir="/fsx/run",
        working_directory="/fsx",
        argv=("python", "-m", "kit.train"),
        num_nodes=num_nodes,
        num_processes=num_nodes * per_node,
    )
    return JobSpec(**(given | changes))


@pytest.mark.parametrize("name", WITH_JOBS)
def test_every_site_that_runs_jobs_renders_one(name):
    site = Site.load(name)
    texts = scripts(job_on(site, num_nodes=1), site)
    assert render(job_on(site, num_nodes=1), site) == list(texts.values())[-1]
    assert Site.from_json(site.to_json()) == site
    for text in (
        render(job_on(site, num_nodes=1), site),
        render(job_on(site, num_nodes=1, per_node=1), site),
    ):
        assert not re.search(r"\b1 (nodes|ranks|pods|processes)\b", text)


def test_each_site_starts_ranks_in_its_own_way():
    """LUMI: docs.lumi-supercomputer.eu and github.com/spyysalo/lumi-llm-scaling.

    Perlmutter: docs.nersc.gov.
    """
    lumi = render(job_on(Site.load("lumi")), Site.load("lumi"))
    assert "#SBATCH --partition=standard-g" in lumi and "#SBATCH --gpus-per-node=mi250:8" in lumi
    assert "#SBATCH --hint=nomultithread" in lumi and "#SBATCH --mem=0" in lumi
    masks = [
        "0xfe000000000000",
        "0xfe00000000000000",
        "0xfe0000",
        "0xfe000000",
        "0xfe",
        "0xfe00",
        "0xfe00000000",
        "0xfe0000000000",
    ]
    assert f"--cpu-bind=mask_cpu:{','.join(masks)}" in lumi
    assert "export FI_CXI_DEFAULT_CQ_SIZE=262144" in lumi
    perlmutter = render(job_on(Site.load("perlmutter")), Site.load("perlmutter"))
    assert "#SBATCH --constraint=gpu\n" in perlmutter and "#SBATCH --qos=regular" in perlmutter
    assert "#SBATCH --gpus-per-node=4" in perlmutter and "#SBATCH --ntasks-per-node=4" in perlmutter
    assert "export NCCL_NET='AWS Libfabric'" in perlmutter and "module load nccl" in perlmutter


@pytest.mark.parametrize(
    ("name", "job", "message"),
    [
        ("frontier", {"num_nodes": 9473}, "9473 is more than the 9,472 nodes.*at most 75,776 dev"),
        (
            "frontier",
            {"num_nodes": 4, "per_node": 32},
            "128 ranks on 4 nodes are 32 a node.*has 8 devices. Use num_nodes=16",
        ),
        ("perlmutter", {"run_dir": "/scratch/a%j"}, "job.run_dir.*patterns.*without them"),
        ("perlmutter", {"run_dir": "/scratch/a\\j"}, "job.run_dir.*patterns.*without them"),
        ("selene", {}, r'has no \[slurm\] table.*base = "selene"'),
    ],
)
def test_what_a_site_cannot_hold_is_refused_with_the_way_out(name, job, message):
    site = Site.load(name)
    with pytest.raises(ConfigError, match=message):
        render(job_on(site, **job), site)


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (8, 1), (16, 2), (3072, 384)])
def test_nodes_for_a_plan(devices, nodes):
    assert nodes_for(devices, Site.load("frontier")) == nodes
    message = r"12 devices do not fill.*Use 8 \(1 node\) or 16 \(2 nodes\)"
    with pytest.raises(ConfigError, match=message):
        nodes_for(12, Site.load("frontier"))


def test_what_is_allowed_but_worth_a_second_look_is_said():
    site = Site.load("frontier")
    assert warnings(job_on(site, num_nodes=16), site) == []
    (asked,) = warnings(job_on(site, num_nodes=16, time_limit_s=6 * 3600), site)
    assert "6 h were asked for, but frontier gives 16 nodes 2 h" in asked
    assert f"# WARNING: {asked}" in render(job_on(site, num_nodes=16, time_limit_s=6 * 3600), site)
    (short,) = warnings(job_on(site, num_nodes=16, time_limit_s=300), site)
    assert "used up by the 600 s" in short
    (idle,) = warnings(job_on(site, num_nodes=2, per_node=6), site)
    assert "4 of the 16 devices" in idle


@pytest.mark.parametrize(
    ("nodes", "hours"), [(1, 2), (91, 2), (92, 6), (183, 6), (184, 12), (9472, 12)]
)
def test_frontier_walltime_bins(nodes, hours):
    """Scheduling policy of the Frontier User Guide."""
    site = Site.load("frontier")
    assert site.slurm is not None and site.slurm.max_seconds(nodes) == hours * 3600
    assert f"#SBATCH --time={hours:02d}:00:00" in render(job_on(site, num_nodes=nodes), site)


def test_packaged_site_must_be_filled_in_before_it_is_submitted(tmp_path):
    with pytest.raises(
        ConfigError, match=r'site\.slurm\.account: still \'EDIT\'.*base = "frontier"'
    ):
        check_submittable(Site.load("frontier"))
    file = tmp_path / "my-frontier.toml"
    file.write_text(
        'base = "frontier"\n[slurm]\naccount = "abc123"\n[slurm.environment]\nNCCL_DEBUG = "WARN"\n'
    )
    mine = Site.load(file)
    check_submittable(mine)
    assert mine.slurm is not None and mine.slurm.partition == "batch", (
        "the rest comes from the base"
    )
    assert mine.slurm.environment == {"FI_CXI_RDZV_PROTO": "alt_read", "NCCL_DEBUG": "WARN"}
    assert mine.device == Site.load("frontier").device


@pytest.mark.parametrize("base", ["fronteir", "x.toml", 3])
def test_unknown_base_is_refused(tmp_path, base):
    import json

    file = tmp_path / "my.toml"
    file.write_text(f"base = {json.dumps(base)}\n")
    with pytest.raises(ConfigError, match="site.base.*Allowed: .*frontier"):
        Site.load(file)


def test_profile_is_named_by_the_site():
    site = Site.load("trn1.32xlarge")
    assert site.profile("hlat-7b")["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    with pytest.raises(ConfigError, match="Did you mean 'hlat-7b'.*Allowed: hlat-70b"):
        site.profile("hlat-71b")
    with pytest.raises(ConfigError, match="profiles: 'x' is unknown"):
        Site.load("laptop").profile("x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('acount = "x"', r"site\.slurm\.acount: unknown key. Did you mean 'account'"),
        ('account = "a b"', r"slurm\.account: 'a b' is not allowed"),
        ('partition = "x\\n#SBATCH --hold"', r"slurm\.partition"),
        ('sbatch_options = ["--mem=0 --hold"]', r"slurm\.sbatch_options: '--mem=0 --hold'"),
        (
            'sbatch_options = ["--output=/home/me/.profile"]',
            r"slurm\.sbatch_options: '--output=.*sets it itself",
        ),
        (
            'sbatch_options = ["--outp=/home/me/.profile"]',
            r"slurm\.sbatch_options: '--outp=.*the kit sets it itself",
        ),
        ('sbatch_options = ["-oprofile"]', r"slurm\.sbatch_options: '-oprofile' .*not written out"),
        ('sbatch_options = ["--wrap=id"]', r"slurm\.sbatch_options: '--wrap=id'"),
        ('srun_options = ["; rm"]', r"slurm\.srun_options"),
        ('modules = ["rocm; rm"]', r"slurm\.modules"),
        ("cpus_per_task = 0", r"slurm\.cpus_per_task: 0 is not allowed"),
        (
            'launcher = "mpirun"',
            r"slurm\.launcher: 'mpirun' is not allowed. Allowed: 'srun', 'torchrun'",
        ),
        ('environment = {"A-B" = "1"}', r"slurm\.environment: 'A-B' cannot be exported"),
        (
            'environment = {WANDB_API_KEY = "1"}',
            r"slurm\.environment\.WANDB_API_KEY: looks like a secret",
        ),
        ('broadcast = {directory = "/mnt/$HOME/x"}', r"broadcast\.directory.*it may name \$USER"),
        ('broadcast = {directory = "disk"}', r"broadcast\.directory.*absolute"),
        (
            "walltime = [{max_nodes = 9, max_hours = 2}, {max_nodes = 9, max_hours = 4}]",
            r"must rise from bin to bin",
        ),
        ("walltime = [{max_hours = 0}]", r"walltime"),
    ],
)
def test_nonsense_in_the_slurm_table_is_refused_and_located(tmp_path, line, message):
    file = tmp_path / "my.toml"
    file.write_text(f'base = "selene"\n[slurm]\n{line}\n')
    with pytest.raises(ConfigError, match=f"my.toml: .*{message}"):
        Site.load(file)


def test_largest_job_is_the_smaller_of_the_partition_and_the_last_bin():
    slurm = Slurm.from_dict({"max_nodes": 100, "walltime": [{"max_nodes": 64, "max_hours": 1}]})
    assert slurm.largest_job == 64
    assert slurm.max_seconds(65) is None
    assert Slurm(max_nodes=100).largest_job == 100 and Slurm().largest_job is None


def test_quoted_words_stay_on_one_line():
    assert quote("plain/word") == "plain/word"
    assert quote("a b") == "'a b'"
    assert quote("a'\\\nb") == "$'a\\'\\\\\\x0ab'"
