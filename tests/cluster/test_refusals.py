"""Errors that are raised before any file is written or any job is submitted. Each error message
says how to correct the problem.

test_site.py tests invalid site files.
"""

import pytest

from cluster.job import Job, JobSpec
from cluster.kubernetes.manifest import manifests
from cluster.record import ConfigError
from cluster.render import check_submittable, nodes_for, render
from cluster.site import Fact, RemotePaths, Site
from cluster.slurm import inventory
from cluster.state import JobError
from cluster.submission import submit
from tests.cluster.eks import eks, training_job
from tests.cluster.jobs import LAPTOP

FRONTIER = Site.load("frontier")
SLIP = {"bf16": Fact(value=2250, source="a slip")}


def job(**changes):
    given = {"name": "a", "run_dir": "run", "argv": ("true",), "num_processes": 1, **changes}
    return JobSpec(**given)


def rendered(name, num_nodes=2, per_node=None, **changes):
    site = Site.load(name)
    num_processes = num_nodes * (per_node or site.devices_per_node)
    return render(job(num_nodes=num_nodes, num_processes=num_processes, **changes), site)


def there(folder="/lustre/me", **where):
    return RemotePaths(python="/usr/bin/python3", folder=folder, **where)


def measured(value):
    return LAPTOP.with_measured_peak("fp32", value, "a broken clock")


def secret(name):
    return lambda: job(environment={name: "x"}), f"{name}: looks like.*eave it out"


def unnamable(name):
    return lambda: job(environment={name: "0"}), "cannot be exported"


def in_teraflops(chip, field):
    return lambda: FRONTIER.device.replace(name=chip, **{field: SLIP}), (
        rf"{field}\.bf16: 2250 .* are 2.25e\+15"
    )


SECRETS = (
    "HF_TOKEN HF_TOKENS HF_TOKEN_FILE WANDB_API_KEY WANDBKEY wandbApiKey AWS_SECRET_ACCESS_KEY"
    " AWSSECRETACCESSKEY password DB_PASSWD DB_PASS dbPass PASS DB_PWD GITHUB_PAT HTTP_AUTH AUTH"
    " SECRETS"
).split()
CHIPS = ("NVIDIA B200", "AMD Instinct MI300X", "Trainium2 NeuronCore")
PEAKS = ("peak_flops_per_s", "matmul_flops_per_s")
REFUSED = [
    # The following rows have an invalid field of a job specification.
    (lambda: job(argv=()), "job.argv"),
    (lambda: job(argv="python train.py"), "job.argv"),
    (lambda: job(argv=("x", "\udcff")), "not valid text"),
    (lambda: job(num_processes=0), "num_processes"),
    (lambda: job(num_processes=9, num_nodes=2), "multiple of num_nodes"),
    (lambda: job(time_limit_s=0), "time_limit_s"),
    (lambda: job(name="a\nrm -rf"), "job.name"),
    (lambda: job(environment={"RANK": "0"}), "the launcher sets it"),
    (lambda: job(environment={"A": "x\0y"}), "NUL"),
    (lambda: job(environment={"A": 1}), "environment.A"),
    *map(unnamable, ["A=B", "A-B", "A;B", "1A", "", "A B", "Ä", "A\n"]),
    *map(secret, SECRETS),
    # The following rows are jobs that this machine cannot run.
    (lambda: submit(job(argv=("no-such-program",)), LAPTOP), "no-such-program"),
    (lambda: submit(job(argv=("./train.sh",)), LAPTOP), "not an executable"),
    (lambda: submit(job(working_directory="/no/such"), LAPTOP), "not a directory"),
    (lambda: submit(job(num_processes=3072), LAPTOP), "at most 256"),
    (lambda: submit(job(num_processes=2, num_nodes=2), LAPTOP), "another site"),
    (lambda: Job.attach("."), "no job here"),
    # The following rows are jobs that do not fit their site.
    (lambda: rendered("frontier", 9473), "9473 is more than the 9,472 nodes.*at most 75,776 dev"),
    (
        lambda: rendered("frontier", 4, 32),
        "128 ranks on 4 nodes are 32 a node.*has 8 devices. Use num_nodes=16",
    ),
    (lambda: rendered("perlmutter", run_dir="/a%j"), "job.run_dir.*patterns.*without them"),
    (lambda: rendered("perlmutter", run_dir="/a\\j"), "job.run_dir.*patterns.*without them"),
    (lambda: rendered("selene"), r'has no \[slurm\] table.*base = "selene"'),
    (
        lambda: nodes_for(12, FRONTIER),
        r"12 devices do not fill.*Use 8 \(1 node\) or 16 \(2 nodes\)",
    ),
    (lambda: manifests(training_job(run_dir="/me"), eks()), "job.run_dir: '/me'.*/fsx"),
    (lambda: manifests(training_job(working_directory="/me"), eks()), "directory: '/me'.*/fsx"),
    (lambda: eks(secrets={"HF_TOKEN": "hunter2"}), r"secrets\.HF_TOKEN: 'hunter2'"),
    # The following rows have a wrong name of a site, or lack a number that a site needs.
    *((lambda name=name: Site.load(name), "frontier") for name in ("../sites/frontier", "", "/")),
    (lambda: Site.load("nowhere.toml"), "frontier"),
    (lambda: Site.load("fronteir"), "Did you mean 'frontier'"),
    (lambda: FRONTIER.peak_flops_per_s("bf61"), "Did you mean 'bf16'"),
    (
        lambda: Site.load("trn1.32xlarge").profile("hlat-71b"),
        "'hlat-71b' is unknown. Allowed: hlat-70b",
    ),
    (lambda: LAPTOP.profile("x"), "profiles: 'x' is unknown"),
    (lambda: check_submittable(FRONTIER), r"slurm\.account: still 'EDIT'.*base = \"frontier\""),
    (lambda: Fact(value=1.0, source=" "), "source"),
    (lambda: measured(0.14), "Give FLOP/s, not TFLOP/s"),
    *(
        (lambda value=value: measured(value), "Give (a finite|at most)")
        for value in (0.0, -1.0, float("nan"), 1e18)
    ),
    *(in_teraflops(chip, field) for chip in CHIPS for field in PEAKS),
    # The following rows are invalid sites behind a login node.
    (there, "either source, .* or sync"),
    (lambda: there("runs", sync=True), "there.folder: 'runs' is.* Give an absolute path"),
    (lambda: FRONTIER.replace(login="-oProxyCommand=x"), "login: '-oProxyCommand=x' is not all"),
    # The following rows are outputs of Slurm commands that cannot be parsed.
    (lambda: inventory.parse_node_types("PARTITION AVAIL TIMELIMIT"), "is not of the form"),
    (
        lambda: inventory.choose_node_type(
            inventory.parse_node_types("gpu|2|64|257000|30:00|1|gpu:4"), "gpuu"
        ),
        "--partition: 'gpuu' is unknown. Did you mean 'gpu'",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_job_or_site_is_refused_with_advice(tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, JobError), match=message):
        call()
    assert not list(tmp_path.iterdir()), "something was written"
