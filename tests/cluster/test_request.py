"""Resource requests that the kit computes if the site file has none, checked by a real Slurm."""

import json
import re
import subprocess
import sys

import pytest

from cluster.kubernetes.manifest import manifests
from cluster.record import ConfigError
from cluster.render import scripts, warnings
from cluster.request import derived
from cluster.site import Site
from cluster.slurm import array_script
from cluster.state import JobError, JobState
from cluster.submission import submit
from tests.cluster.eks import eks
from tests.cluster.jobs import job_spec, with_slurm

GPU_SITES = [
    name
    for name in Site.names()
    if (site := Site.load(name)).scheduler == "slurm"
    and site.device.is_gpu
    and site.devices_per_node <= 8  # A simulated node has eight GPUs.
]


def based_on(base, tmp_path, slurm="", head=""):
    """Returns a site from a minimal site file, which has only a base site and a partition."""
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "{base}"\n{head}\n[slurm]\npartition = "batch"\n{slurm}\n')
    site = Site.load(str(file))
    # The simulated nodes have no accounts, features or GPU types, and fewer cores than the site's
    # nodes.
    absent: dict[str, str | int | None] = dict.fromkeys(("account", "qos", "constraint"))
    if site.slurm and site.slurm.cpus_per_task:
        absent["cpus_per_task"] = 1
    if site.slurm and site.slurm.gpus_per_node:
        absent["gpus_per_node"] = site.slurm.gpus_per_node.rpartition(":")[2]
    return with_slurm(site, **absent)


def job_of(site, tmp_path, per_node=None, num_nodes=2, **changes):
    per_node = per_node or site.devices_per_node
    return job_spec(
        tmp_path / "run", "true", num_nodes=num_nodes, num_processes=num_nodes * per_node, **changes
    )


def asked_of_slurm(sandbox, job, site, tmp_path):
    """Submits a job with --hold, which does not start. Returns (fields of `scontrol show job`, text
    of submit.sh).
    """
    (tmp_path / "logs").mkdir(exist_ok=True)
    text = scripts(job, site)["submit.sh"]
    (tmp_path / "submit.sh").write_text(text)
    words = ["sbatch", "--hold", "--parsable", "submit.sh"]
    sent = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
    number = sent.stdout.strip()
    line = sandbox.run("scontrol", "--oneliner", "show", "job", number)
    sandbox.run("scancel", number)
    return dict(re.findall(r"(\w+)=(\S*)", line)), text


@pytest.mark.parametrize("name", GPU_SITES)
def test_minimal_site_file_requests_gpus(sandbox, tmp_path, name):
    site = based_on(name, tmp_path)
    found, text = asked_of_slurm(sandbox, job_of(site, tmp_path), site, tmp_path)
    # Frontier allocates whole nodes, and srun divides the GPUs among the tasks.
    if name == "frontier":
        assert "--gpus-per-task=1" in text and not found.get("TresPerNode")
        return
    assert found["TresPerNode"] == f"gres:gpu:{site.devices_per_node}"
    if name not in ("perlmutter", "lumi"):
        assert found["OverSubscribe"] == "NO" and found["MinMemoryNode"] == "0"


def test_partial_node_job_requests_its_share(sandbox, tmp_path):
    site = based_on("mi300x", tmp_path)  # No source gives the number of cores of this site.
    job = job_of(site, tmp_path, per_node=2, num_nodes=1, time_limit_s=3600)
    found, text = asked_of_slurm(sandbox, job, site, tmp_path)
    assert (found["TresPerNode"], found["OverSubscribe"]) == ("gres:gpu:2", "OK")
    assert "site.slurm.cpus_per_task is not given" in text and "No --time" not in text
    assert not [text for text in warnings(job, site) if "idle" in text]
    site = based_on("dgx-h100", tmp_path)  # A node of this site has 112 cores.
    text = scripts(job, site)["submit.sh"]
    assert "#SBATCH --cpus-per-task=14\n" in text and "(NVIDIA DGX H100 data sheet" in text
    typed = with_slurm(site, gpus_per_node="h100:8", cpus_per_task=14)
    text = scripts(job, typed)["submit.sh"]
    assert "#SBATCH --gpus-per-node=h100:2\n" in text and "--cpus-per-task=14" in text


def test_ranks_see_the_gpus_and_cpus_of_their_node(sandbox, tmp_path):
    """Slurm sets CUDA_VISIBLE_DEVICES for each rank. The CPUs of the node are divided among the
    ranks.
    """
    # A node has four GPUs and eight CPUs.
    site = based_on("perlmutter", tmp_path, "derive_request = true")
    site = with_slurm(site, gpus_per_node=None, cpus_per_task=None, modules=(), environment={})
    code = "import os; print(*(os.environ[k] for k in ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS',"
    code += " 'SLURM_CPUS_PER_TASK')))"
    run = job_spec(tmp_path / "run", sys.executable, "-c", code, num_nodes=1, num_processes=4)
    site = with_slurm(site, gpu_bind=None, network_interfaces=())
    job = submit(run, site)
    assert job.wait(120).state is JobState.DONE, job.status()
    assert [job.logs(rank) for rank in range(4)] == ["0,1,2,3 2 2\n"] * 4


def test_array_of_cpu_tasks_requests_no_gpu(tmp_path):
    slurm = 'gpus_per_node = "h100:8"\ncpus_per_task = 14\n'
    slurm += 'sbatch_options = ["--exclusive", "--gres=gpu:8", "--reservation=mine"]'
    site = based_on("dgx-h100", tmp_path, slurm)
    site = with_slurm(site, cpus_per_task=14)
    script = array_script(job_of(site, tmp_path, num_nodes=1), site, 3)
    directives = re.findall(r"#SBATCH (.*)", script)
    assert not [each for each in directives if "gpu" in each or "exclusive" in each]
    assert {"--ntasks-per-node=1", "--cpus-per-task=112", "--reservation=mine"} <= {*directives}
    assert "Left out of sbatch_options: --exclusive, --gres=gpu:8." in script


def test_trainium_job_requests_whole_nodes_without_gres(sandbox, tmp_path):
    site = based_on("trn1.32xlarge", tmp_path)
    job = job_of(site, tmp_path, per_node=8, num_nodes=1)
    found, text = asked_of_slurm(sandbox, job, site, tmp_path)
    assert found["OverSubscribe"] == "NO" and not found.get("TresPerNode")
    assert "No GRES" in text and "No --time" in text


@pytest.mark.parametrize(
    ("base", "slurm", "message"),
    [
        ("gaudi2", "", r"site.device.name: 'Intel Gaudi 2' does not say how Slurm.*--gres=NAME:8"),
        ("dgx-h100", "derive_request = false", r"derive_request: false, and nothing.*for GPUs"),
        ("dgx-h100", 'gpus_per_node = "h100:4"', r"'h100:4' gives 4 GPUs to the 8 ranks"),
        ("dgx-h100", 'launcher = "torchrun"\ngpus_per_task = 1', r"'torchrun' gives 1 GPU to the"),
    ],
)
def test_request_without_enough_gpus_is_refused(tmp_path, base, slurm, message):
    site = based_on(base, tmp_path)
    site = Site.load(str(_with(tmp_path / "mine.toml", slurm)))
    with pytest.raises(ConfigError, match=message):
        scripts(job_of(site, tmp_path), site)


def test_cpus_of_a_torchrun_task_are_explained(tmp_path):
    site = based_on("dgx-h100", tmp_path, 'launcher = "torchrun"')
    (line,) = [
        line
        for line in derived(job_of(site, tmp_path, per_node=3, num_nodes=1), site)
        if line.startswith("--cpus-per-task")
    ]
    assert line.startswith("--cpus-per-task=42:") and "112" in line
    assert line.endswith("divided by its 8 devices, times the 3 ranks of a task.")


def _with(file, slurm):
    file.write_text(f"{file.read_text()}{slurm}\n")
    return file


def test_gpu_refusal_by_slurm_comes_with_advice(sandbox, site, tmp_path):
    job = job_spec(tmp_path / "run", "true", num_nodes=1, num_processes=1)
    with pytest.raises(JobError, match=r"configuration is not available.*sinfo --format.*TYPE:8"):
        submit(job, with_slurm(site, gpus_per_node="h100:1"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "slurm",
    [
        'sbatch_options = ["--gres=gpu:h100:8"]',
        'sbatch_options = ["--gpus=16"]',
        'sbatch_options = ["--tres-per-node=gres/gpu:8"]',
        'gpus_per_node = "8"\nsbatch_options = ["--exclusive=user", "--mem=500G"]',
    ],
)
def test_site_file_overrides_derived_request(tmp_path, slurm):
    site = Site.load(str(_with(_short(tmp_path), slurm)))
    text = scripts(job_of(site, tmp_path), site)["submit.sh"]
    directives = re.findall(r"#SBATCH (.*)", text)
    assert sum("gpu" in each for each in directives) == 1
    assert sum(each.startswith("--exclusive") for each in directives) == 1
    assert sum(each.startswith("--mem") for each in directives) == 1


def _short(tmp_path):
    based_on("dgx-h100", tmp_path)
    return tmp_path / "mine.toml"


@pytest.mark.parametrize(
    ("base", "per_pod", "expected"),
    [
        ("dgx-h100", 8, {"nvidia.com/gpu": "8"}),
        ("dgx-h100", 2, {"nvidia.com/gpu": "2"}),
        ("mi300x", 8, {"amd.com/gpu": "8"}),
        ("trn1.32xlarge", 32, {"aws.amazon.com/neuron": "16"}),
    ],
)
def test_pods_request_their_devices(base, per_pod, expected):
    given = {"cpu": "100"}
    site = Site.load(base).replace(
        scheduler="kubernetes", slurm=None, kubernetes=eks(resources=given).kubernetes
    )
    job = job_spec("/fsx/run", "python", num_nodes=2, num_processes=2 * per_pod)
    job = job.replace(working_directory="/fsx")
    pod, *_, script = manifests(job, site)
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == dict.fromkeys(("requests", "limits"), {**given, **expected})
    (line,) = derived(job, site)
    assert json.loads(json.dumps(script))["data"]["run.sh"].count(line) == 1
    few = site.replace(kubernetes=eks(resources={"nvidia.com/gpu": "1"}).kubernetes)
    if base == "dgx-h100":
        with pytest.raises(ConfigError, match=r"nvidia.com/gpu: 1 for the \d ranks of a pod"):
            manifests(job, few)
