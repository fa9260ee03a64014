"""Batch scripts: what they say is compared with the sites' documentation and the papers, and they
are run.

In place of Slurm stands a fake `srun` that runs every task here, one after the other; the real one
is used in test_slurm.py. The golden files are what a user sees. After a wanted change:
KIT_UPDATE_GOLDEN=1 pytest THIS_FILE
"""

import difflib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster import slurm
from cluster.job import JobSpec
from cluster.render import scripts
from cluster.scheduler import Broadcast
from cluster.site import Site
from cluster.slurm import script as slurm_script
from tests.cluster.shell import hostile_text, programs, shellcheck, told

GOLDEN = Path(__file__).parent / "golden"

FAKES = {
    "srun": (
        """
for word in "$@"; do
    case $word in --ntasks=*) tasks=${word#*=} ;; --ntasks-per-node=*) per_node=${word#*=} ;; esac
done
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=$tasks
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$((task / per_node)) "$@" || exit
done"""  # noqa: E501
    ),
    "python": (
        """
[ "$1" != -S ] || shift
module=$2
case $module in
    cluster.slurm.supervisor) shift 4; export KIT_ATTEMPT=3; mkdir -p "$KIT_RUN_DIR/logs/attempt_03" ;;
    cluster.slurm.rank) shift 2 ;;
    torch.distributed.run)
        for word in "$@"; do
            case $word in --node-rank=*) node=${word#*=} ;; --nproc-per-node=*) ranks=${word#*=} ;; esac
        done
        while [[ $1 != bash ]]; do shift; done
        for ((rank = 0; rank < ranks; rank++)); do
            RANK=$((node * ranks + rank)) LOCAL_RANK=$rank "$@" || exit
        done
        exit ;;
esac
exec "$@" """  # noqa: E501
    ),
    "scontrol": "echo node1; echo node2",
    "sbcast": 'cp "$2" "$3"',
    "neuron_parallel_compile": 'export NEURON_EXTRACT_GRAPHS_ONLY=1; exec "$@"',
    "module": 'echo "$@" >>"$KIT_RUN_DIR/modules"',
    "sudo": "true",
}


def frontier():
    """Frontier with the values that only a user knows."""
    site = Site.load("frontier")
    assert site.slurm is not None
    broadcast = Broadcast(
        directory="/mnt/bb/$USER/environment", archive="/lustre/orion/abc123/environment.tar"
    )
    return site.replace(slurm=site.slurm.replace(account="abc123", broadcast=broadcast))


def trn1():
    site = Site.load("trn1.32xlarge")
    assert site.slurm is not None
    return site.replace(slurm=site.slurm.replace(partition="compute1"))


def training_job(name, *, tensor, pipeline, data, num_nodes, environment=None):
    return JobSpec(
        name=name,
        run_dir=f"/shared/runs/{name}",
        num_processes=tensor * pipeline * data,
        num_nodes=num_nodes,
        argv=("/shared/environment/bin/python", "-m", "kit.train", "--run", f"/shared/runs/{name}"),
        environment=environment or {},
        working_directory="/shared/work",
    )


# Layouts of the papers. Frontier: launch scripts of Dash et al.
# (github.com/sajal-vt/Megatron-DeepSpeed-ORNL), 1T on the 3,072 GCDs of arXiv 2312.12705. HLAT:
# github.com/awslabs/HLAT and arXiv 2404.10630, on instances of 32 cores.
JOBS = {
    "frontier-22b": (frontier, dict(tensor=1, pipeline=8, data=2, num_nodes=2)),
    "frontier-175b": (frontier, dict(tensor=4, pipeline=16, data=2, num_nodes=16)),
    "frontier-1t": (frontier, dict(tensor=8, pipeline=64, data=6, num_nodes=384)),
    "hlat-7b": (trn1, dict(tensor=8, pipeline=1, data=256, num_nodes=64)),
    "hlat-70b": (trn1, dict(tensor=32, pipeline=8, data=32, num_nodes=256)),
}


@pytest.fixture
def portable(monkeypatch):
    """Scripts that do not name this machine's paths."""
    monkeypatch.setattr(slurm_script.sys, "executable", "/shared/environment/bin/python")
    monkeypatch.setattr(slurm_script, "PACKAGE_ROOT", Path("/shared/kit"))


def render_golden(name):
    make_site, layout = JOBS[name]
    site = make_site()
    environment = site.profile(name) if name.startswith("hlat") else None
    return scripts(training_job(name, **layout, environment=environment), site)


def directives(script):
    """Returns the options that sbatch reads: it stops at the first line that is neither comment
    nor empty.
    """
    found = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            return found
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH ").partition("=")
            found[option] = value
    return found


def exports(script):
    """Returns exported variables with their literal or unevaluated values."""
    found = {}
    for line in script.splitlines():
        if match := re.match(r"\s*export ([A-Za-z_].*)", line):
            for word in shlex.split(match[1], comments=True):
                name, equals, value = word.partition("=")
                if equals:
                    found[name] = value
    return found


def launch(script):
    """Returns the words of the last command: options of srun, then what it starts."""
    words = shlex.split(script[script.rindex("\nexec ") :].replace("\\\n", " "))
    return words[words.index("srun") :]


@pytest.mark.parametrize("name", ["frontier-1t", "hlat-70b"])
def test_golden_scripts_are_what_users_see(portable, name):
    """submit.sh as a whole, and what compile.sh has instead of its lines."""
    texts = render_golden(name)
    run = texts.pop("submit.sh")
    kept = {f"{name}.submit.sh": run}
    for other, text in texts.items():
        changes = difflib.unified_diff(run.splitlines(True), text.splitlines(True), n=0)
        kept[f"{name}.{other}.diff"] = "".join(changes)
    for file_name, text in kept.items():
        if os.environ.get("KIT_UPDATE_GOLDEN"):
            (GOLDEN / file_name).write_text(text)
        assert text == (GOLDEN / file_name).read_text()


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "time"),
    [
        ("frontier-22b", 2, 16, "02:00:00"),
        ("frontier-175b", 16, 128, "02:00:00"),
        ("frontier-1t", 384, 3072, "12:00:00"),
    ],
)
def test_frontier_as_olcf_documents_it(portable, name, nodes, ranks, time):
    """docs.olcf.ornl.gov: "PyTorch on Frontier" (batch script, best practices) and the
    scheduling policy's bins.
    """
    script = render_golden(name)["submit.sh"]
    asked = {
        "--nodes": str(nodes),
        "--time": time,
        "--account": "abc123",
        "--partition": "batch",
        "--constraint": "nvme",
        "--network": "disable_rdzv_get",
        "--requeue": "",
        "--open-mode": "append",
        "--signal": "B:USR1@600",
    }
    assert asked.items() <= directives(script).items()
    modules = re.findall(r"^module load (\S+)", script, re.MULTILINE)
    assert modules[:3] == ["PrgEnv-gnu/8.7.0", "cpe/26.03", "miniforge3/23.11.0-0"]
    assert modules[3:] == ["rocm/7.1.1", "rccl-net-plugin", "craype-accel-amd-gfx90a"]
    variables = {
        "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
        "NCCL_NET": "OFI",
        "FI_CXI_RDZV_PROTO": "alt_read",
        "OMP_NUM_THREADS": "7",
        "KIT_ENVIRONMENT": "/mnt/bb/$USER/environment",
    }
    assert variables.items() <= exports(script).items()
    assert "$SLURM_LOCALID" in exports(script)["MIOPEN_USER_DB_PATH"]
    assert "memhooks" not in script and "torch.distributed.run" not in script
    words = f"--nodes={nodes} --ntasks={ranks} --cpus-per-task=7 --gpus-per-task=1"
    more = "--gpu-bind=closest --kill-on-bad-exit=1"
    assert {*words.split(), *more.split()} <= {*launch(script)}
    archive = "/lustre/orion/abc123/environment.tar"
    assert f'sbcast --force {archive} "$KIT_ENVIRONMENT/environment.tar"' in script
    assert "exec python -m kit.train" in script, "ranks must start from the node's own disk"


def test_frontier_uses_sockets_on_one_node(portable):
    job = training_job("small", tensor=8, pipeline=1, data=1, num_nodes=1)
    assert exports(scripts(job, frontier())["submit.sh"])["NCCL_NET"] == "Socket"


def test_a_task_of_an_array_is_a_node_that_is_told_which_it_is(portable, tmp_path):
    job = training_job("web", tensor=8, pipeline=1, data=1, num_nodes=1)
    job = job.replace(argv=("/bin/echo", "it's $HOME", "--part"), working_directory=str(tmp_path))
    site, quiet = frontier(), "module() { true; }; SLURM_ARRAY_TASK_ID=2; "
    script = slurm.array_script(job, site, 12)
    options = directives(script)
    assert (options["--nodes"], options["--account"], options["--time"]) == (
        "1",
        "abc123",
        "02:00:00",
    )
    assert (
        options["--output"] == "logs/task-%a.log"
        and "--requeue" in options
        and "--signal" not in options
    )
    said = subprocess.run(
        ["bash", "-c", quiet + script], capture_output=True, text=True, check=True
    ).stdout
    assert said == "it's $HOME --part 2/12\n"


# Variables of the released launch scripts, github.com/awslabs/HLAT, 7b/ and 70b/.
HLAT_COMMON = {
    "NEURON_CC_FLAGS": "--model-type transformer --distribution-strategy=llm-training",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_EXEC_TIMEOUT": "4000",
    "MALLOC_ARENA_MAX": "64",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
}
HLAT = {
    "hlat-7b": {
        "XLA_USE_BF16": "1",
        "XLA_DOWNCAST_BF16": "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS": "",
        "NEURON_RT_ENABLE_VERBOSE_NUMERICAL_ERRORS": "0",
    },
    "hlat-70b": {
        "XLA_USE_BF16": "0",
        "XLA_DOWNCAST_BF16": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "31",
        "NEURON_EXPERIMENTAL_COMPRESS_RG": "1",
        "TORCH_DIST_INIT_BARRIER": "0",
    },
}


@pytest.mark.parametrize(("name", "nodes"), [("hlat-7b", 64), ("hlat-70b", 256)])
def test_trainium_as_hlat_released_it(portable, name, nodes):
    texts = render_golden(name)
    assert list(texts) == ["compile.sh", "submit.sh"], "the compile job comes first"
    for script in texts.values():
        variables = exports(script)
        expected = HLAT_COMMON | HLAT[name]
        assert {key: variables.get(key) for key in expected} == expected
        assert variables["MASTER_PORT"] == "41000"
        assert f"--nnodes={nodes}" in script and "--nproc-per-node=32" in script
        assert "ulimit -n 131071" in script
        assert "ip_local_reserved_ports=44000,48620,41000,23456" in script
        assert directives(script)["--nodes"] == str(nodes) and "--exclusive" in directives(script)
        assert directives(script)["--cpus-per-task"] == "128"
        assert f"--ntasks={nodes}" in launch(script)
    absent = set(HLAT["hlat-7b"] | HLAT["hlat-70b"]) - set(HLAT[name])
    assert not absent & set(exports(texts["submit.sh"]))
    assert (
        "exec neuron_parallel_compile" in texts["compile.sh"]
        and "neuron_parallel" not in texts["submit.sh"]
    )
    assert exports(texts["compile.sh"])["NEURON_COMPILE_CACHE_URL"].startswith("/fsx/")
    assert exports(texts["submit.sh"])["NEURON_COMPILE_CACHE_URL"].startswith("/local_storage/")
    assert "cluster.slurm.supervisor" not in texts["compile.sh"], (
        "a compile job is no attempt of the run"
    )


@pytest.mark.parametrize("name", ["lumi", "perlmutter", "generic-gpu-slurm", *JOBS])
def test_scripts_pass_shellcheck(portable, name):
    if name in JOBS:
        texts = render_golden(name)
    else:
        job = training_job(name, tensor=4, pipeline=1, data=1, num_nodes=1)
        texts = scripts(job, Site.load(name))
    for text in texts.values():
        shellcheck(text)


class Bench:
    """A folder with fake commands in which rendered scripts are run."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.bin = folder, programs(folder / "bin", FAKES)
        (folder / "kit").mkdir()
        monkeypatch.setattr(slurm_script.sys, "executable", str(self.bin / "python"))
        monkeypatch.setattr(slurm_script, "PACKAGE_ROOT", folder / "kit")

    def run(self, job, site):
        """Runs all scripts of a job; returns its first rank's words, variables and directory."""
        run_dir = Path(job.run_dir)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        Path(job.working_directory).mkdir(parents=True, exist_ok=True)
        for name, text in scripts(job, site).items():
            (run_dir / name).write_text(text, encoding="utf-8")
            done = self.bash(run_dir, name)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return told(run_dir)

    def bash(self, run_dir, *words):
        environment = {
            "PATH": os.environ["PATH"],
            "USER": "me",
            "HOME": str(self.folder),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "HF_TOKEN": "inherited",
        }
        return subprocess.run(
            ["bash", *words], cwd=run_dir, env=environment, capture_output=True, text=True
        )


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def small_job(bench, **changes):
    given = dict(
        name="small",
        run_dir=str(bench.folder / "run"),
        working_directory=str(bench.folder / "work"),
        argv=(str(bench.bin / "probe"), "a", "b c"),
        num_processes=4,
        num_nodes=2,
    )
    return JobSpec(**(given | changes))


def test_ranks_find_their_place_and_each_other(bench):
    job = small_job(bench, environment={"NCCL_NET": "mine"})
    argv, variables, cwd = bench.run(job, Site.load("perlmutter"))
    assert (argv, cwd) == (["a", "b c"], job.working_directory)
    assert variables["NCCL_NET"] == "mine", "the job's own variables win over the site's"
    assert variables["HF_TOKEN"] == "inherited"
    for rank in range(4):
        _, variables, _ = told(Path(job.run_dir), rank)
        place = {
            name: variables[name]
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "KIT_ATTEMPT")
        }
        assert place == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "KIT_ATTEMPT": "3",
        }
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node1", "20042")
        log = Path(job.run_dir) / "logs" / "attempt_03" / f"rank_{rank:05d}.log"
        assert log.read_text() == f"attempt 3 rank {rank} at node1\n"


def test_frontier_starts_from_the_disk_of_each_node(bench):
    packed = bench.folder / "packed" / "bin"
    packed.mkdir(parents=True)
    (packed / "conda-unpack").write_text("#!/bin/bash\ntouch bin/unpacked\n")
    (packed / "python").write_text('#!/bin/bash\n[ "$1" = -S ] || exec "$@"\nshift 3\nexec "$@"\n')
    for file in packed.iterdir():
        file.chmod(0o755)
    subprocess.run(
        ["tar", "-cf", bench.folder / "environment.tar", "-C", bench.folder / "packed", "bin"],
        check=True,
    )
    broadcast = Broadcast(
        directory=f"{bench.folder}/$USER/disk", archive=str(bench.folder / "environment.tar")
    )
    site = frontier()
    site = site.replace(slurm=site.slurm.replace(broadcast=broadcast))
    job = small_job(bench, argv=("/elsewhere/bin/python3.11", str(bench.bin / "probe")))
    _, variables, _ = bench.run(job, site)
    assert variables["PATH"].startswith(f"{bench.folder}/me/disk/bin:")
    assert (bench.folder / "me" / "disk" / "bin" / "unpacked").exists()
    assert "rccl-net-plugin" in (Path(job.run_dir) / "modules").read_text()


def test_trainium_compiles_first_and_runs_from_the_disk_of_each_node(bench):
    site = trn1()
    shared, local = bench.folder / "fsx", bench.folder / "local"
    compilation = site.slurm.compilation.replace(
        shared_cache=f"{shared}/$USER", node_cache=f"{local}/$USER"
    )
    site = site.replace(slurm=site.slurm.replace(compilation=compilation))
    job = small_job(bench, environment=site.profile("hlat-7b"))
    (shared / "me").mkdir(parents=True)
    (shared / "me" / "graph.neff").write_text("compiled")
    _, variables, _ = bench.run(job, site)
    assert variables["NEURON_COMPILE_CACHE_URL"] == f"{local}/me"
    assert (local / "me" / "graph.neff").read_text() == "compiled"
    assert "NEURON_EXTRACT_GRAPHS_ONLY" not in variables
    assert variables["PET_SIGNALS_TO_HANDLE"] == "SIGINT,SIGHUP,SIGQUIT"
    assert told(Path(job.run_dir), 3)[1]["LOCAL_RANK"] == "1"
    logs = Path(job.run_dir) / "logs"
    assert sorted(str(file.relative_to(logs)) for file in logs.rglob("*.log")) == sorted(
        [
            f"{phase}rank_{rank:05d}.log"
            for phase in ("compile_", "attempt_03/")
            for rank in range(4)
        ]
    )


def test_run_says_what_is_missing_without_a_compile_job(bench):
    site = trn1()
    compilation = site.slurm.compilation.replace(shared_cache=str(bench.folder / "nothing"))
    site = site.replace(slurm=site.slurm.replace(compilation=compilation))
    run_dir = bench.folder / "run"
    run_dir.mkdir()
    script = scripts(small_job(bench), site)["submit.sh"]
    done = bench.bash(run_dir, "-c", script)
    assert done.returncode == 1 and "submit compile.sh first" in done.stderr


hostile_name = hostile_text.map(lambda text: re.sub(r"[/%\\]", "_", text)[:40])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=hostile_text.filter(lambda text: bool(text.strip()) and text.isprintable()),
    folder=hostile_name,
    argv=st.lists(hostile_text, max_size=3),
    environment=st.dictionaries(
        st.sampled_from(["PROXY", "BASH_ENV", "PS4", "prompt"]), hostile_text, max_size=3
    ),
)
def test_hostile_names_paths_and_values_reach_the_ranks_inert(
    bench, name, folder, argv, environment
):
    job = small_job(
        bench,
        name=name,
        run_dir=str(bench.folder / f"run {folder}"),
        argv=(str(bench.bin / "probe"), *argv),
        working_directory=str(bench.folder / f"work {folder}"),
        environment=environment,
        num_processes=1,
        num_nodes=1,
    )
    site = Site.load("perlmutter")
    got_argv, variables, cwd = bench.run(job, site)
    assert got_argv == argv
    assert cwd == job.working_directory
    assert {key: variables[key] for key in environment} == environment
    assert variables["KIT_RUN_DIR"] == job.run_dir
    assert not list(bench.folder.rglob("canary*")), "a value ran as a command"
    plain = directives(scripts(small_job(bench, num_processes=1, num_nodes=1), site)["submit.sh"])
    assert directives(scripts(job, site)["submit.sh"]) | {"--job-name": ""} == plain | {
        "--job-name": ""
    }


RESEMBLING = (
    "TOKENIZERS_PARALLELISM MAX_TOKENS MONKEY_BARS KEYBOARD SECRETARY LD_LIBRARY_PATH PYTHONPATH"
    " OLDPWD AUTHOR SSH_AUTH_SOCK XAUTHORITY CUDA_COMPAT_PATH CUDA_COMPAT COMPASS BYPASS NCCL_DEBUG"
).split()


def test_names_that_only_resemble_secrets_are_written():
    job = training_job("run", tensor=4, pipeline=1, data=1, num_nodes=1)
    job = job.replace(environment=dict.fromkeys(RESEMBLING, "1"))
    script = scripts(job, Site.load("perlmutter"))["submit.sh"]
    assert all(f"export {name}=1" in script for name in RESEMBLING)
