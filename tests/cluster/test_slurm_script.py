"""Batch scripts, compared with golden files and run on this machine with a fake `srun`.

test_slurm.py uses a real Slurm. After an intended change, update the golden files:
KIT_UPDATE_GOLDEN=1 pytest THIS_FILE
"""

import difflib
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster import slurm
from cluster.job import JobSpec
from cluster.record import ConfigError
from cluster.render import render, scripts
from cluster.scheduler import Broadcast
from cluster.site import Site
from cluster.slurm import script as slurm_script
from tests.cluster.jobs import job_spec, with_slurm
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
while [[ $1 == -? && $1 != -m ]]; do shift; done  # then start.py or -m
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


BROADCAST = Broadcast(
    directory="/mnt/bb/$USER/environment", archive="/lustre/orion/abc123/environment.tar"
)
FRONTIER = with_slurm(Site.load("frontier"), account="abc123", broadcast=BROADCAST)
TRN1 = with_slurm(Site.load("trn1.32xlarge"), partition="compute1")


def training_job(name, num_processes, num_nodes, **changes):
    run_dir, python = f"/shared/runs/{name}", "/shared/environment/bin/python"
    given = {"num_nodes": num_nodes, "working_directory": "/shared/work", **changes}
    words = (python, "-P", "-m", "kit.train", "--run", run_dir)
    return job_spec(run_dir, *words, num_processes=num_processes, **given)


# Numbers of ranks and nodes from the papers. Frontier: launch scripts of Dash et al.
# (github.com/sajal-vt/Megatron-DeepSpeed-ORNL), 1T on the 3,072 GCDs of arXiv 2312.12705. HLAT:
# github.com/awslabs/HLAT and arXiv 2404.10630, on instances of 32 cores.
JOBS = {
    "frontier-22b": (FRONTIER, 16, 2),
    "frontier-175b": (FRONTIER, 128, 16),
    "frontier-1t": (FRONTIER, 3072, 384),
    "hlat-7b": (TRN1, 2048, 64),
    "hlat-70b": (TRN1, 8192, 256),
}


@pytest.fixture
def portable(monkeypatch):
    """Replaces this machine's paths in generated scripts by fixed paths, so that golden files fit
    every machine.
    """
    monkeypatch.setattr(slurm_script.sys, "executable", "/shared/environment/bin/python")
    monkeypatch.setattr(slurm_script, "PACKAGE_ROOT", Path("/shared/kit"))
    monkeypatch.setattr(slurm, "PACKAGE_ROOT", Path("/shared/kit"))


def texts_of(name):
    site, *size = JOBS[name]
    environment = site.profile(name) if name.startswith("hlat") else {}
    return scripts(training_job(name, *size, environment=environment), site)


def directives(script):
    """Returns the #SBATCH options that sbatch reads. sbatch stops at the first line that is neither
    empty nor a comment.
    """
    found = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            return found
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH ").partition("=")
            found[option] = value
    return found


@pytest.mark.parametrize("name", ["frontier-1t", "hlat-70b"])
def test_scripts_equal_their_golden_files(portable, name):
    """submit.sh is compared completely. compile.sh is compared by its differences from submit.sh.

    The script for Frontier follows docs.olcf.ornl.gov: "PyTorch on Frontier" (batch script, best
    practices).
    """
    texts = texts_of(name)
    run = texts.pop("submit.sh")
    kept = {f"{name}.submit.sh": run}
    for other, text in texts.items():
        changes = difflib.unified_diff(run.splitlines(True), text.splitlines(True), n=0)
        kept[f"{name}.{other}.diff"] = "".join(changes)
    for file_name, text in kept.items():
        if os.environ.get("KIT_UPDATE_GOLDEN"):
            (GOLDEN / file_name).write_text(text)
        assert text == (GOLDEN / file_name).read_text()


# Settings from the published launch scripts of HLAT's 7B model, github.com/awslabs/HLAT, 7b/.
HLAT_7B = """\
    export XLA_USE_BF16=1
    export XLA_DOWNCAST_BF16=0
    export NEURON_RT_STOCHASTIC_ROUNDING_EN=1
    export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=3
    export NEURON_RT_ENABLE_VERBOSE_NUMERICAL_ERRORS=0
    export NEURON_TRANSFER_WITH_STATIC_RING_OPS=''
"""


@pytest.mark.parametrize(
    ("name", "golden", "time"),
    [
        ("frontier-22b", "frontier-1t", "02:00:00"),
        ("frontier-175b", "frontier-1t", "02:00:00"),
        ("hlat-7b", "hlat-70b", ""),
    ],
)
def test_scripts_of_other_sizes_differ_only_in_values(portable, name, golden, time):
    """The values are the numbers of ranks and nodes, the time limit and, for HLAT, the environment
    profile.
    """
    expected = (GOLDEN / f"{golden}.submit.sh").read_text().replace(golden, name)
    (_, ranks, nodes), (_, all_ranks, all_nodes) = JOBS[name], JOBS[golden]
    for before, after in (
        (f"{all_ranks:,} ranks", f"{ranks:,} ranks"),
        (f"--ntasks={all_ranks}", f"--ntasks={ranks}"),
        (f"{all_nodes} nodes", f"{nodes} nodes"),
        (f"nodes={all_nodes}", f"nodes={nodes}"),
        (f"--ntasks={all_nodes}", f"--ntasks={nodes}"),
        ("12:00:00", time),
    ):
        expected = expected.replace(before, after)
    # With up to 64 ranks, each rank writes a separate log file.
    if ranks <= 64:
        expected = expected.replace('[ "$RANK" != 0 ] || exec >>', "exec >>")
    if golden == "hlat-70b":
        profile = r"    export XLA_USE_BF16=0\n(    export .*\n)+"
        expected = re.sub(profile, lambda _: HLAT_7B, expected)
    assert texts_of(name)["submit.sh"] == expected


def test_frontier_job_on_one_node_uses_nccl_sockets(portable):
    script = scripts(training_job("small", 8, 1), FRONTIER)["submit.sh"]
    assert "export NCCL_NET=Socket\n" in script


def test_array_task_gets_one_node_and_its_number(portable, tmp_path):
    job = training_job("web", 8, 1, working_directory=str(tmp_path))
    job = job.replace(argv=("/bin/echo", "it's $HOME", "--part"))
    script = slurm.array_script(job, FRONTIER, 12)
    asked = {"--nodes": "1", "--account": "abc123", "--time": "02:00:00", "--requeue": ""}
    asked["--output"] = "logs/task-%a.log"
    options = directives(script)
    assert asked.items() <= options.items() and "--signal" not in options
    words = ["bash", "-c", f"module() {{ true; }}; SLURM_ARRAY_TASK_ID=2; {script}"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == "it's $HOME --part 2/12\n"


@pytest.mark.parametrize(
    ("loads", "fails"),
    [
        ("[ $2 != b/2 ] || { echo 'ERROR:105: Unable to locate b/2' >&2; return 0; }; ", True),
        ("", False),
    ],
    ids=["missing", "loaded"],
)
def test_module_error_with_code_0_ends_the_job(portable, tmp_path, loads, fails):
    """Environment Modules 3 returns code 0 after an error. The script therefore checks
    LOADEDMODULES, which version 3 maintains as later versions do.
    """
    job = training_job("web", 8, 1, working_directory=str(tmp_path)).replace(
        argv=("/bin/echo", "x")
    )
    script = slurm.array_script(job, with_slurm(FRONTIER, modules=("a", "b/2", "a")), 1)
    module = f"module() {{ {loads}LOADEDMODULES+=:$2/1; }}; export LOADEDMODULES="
    environment = {k: v for k, v in os.environ.items() if k not in ("LMOD_CMD", "MODULES_CMD")}
    done = subprocess.run(
        ["bash", "-c", f"{module}; SLURM_ARRAY_TASK_ID=1; {script}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == ((1, "") if fails else (0, "x 1/1\n")), done.stderr
    assert done.stderr.endswith("kit: the module b/2 cannot be loaded\n" if fails else "")


@pytest.mark.parametrize("name", ["lumi", "perlmutter", "generic-gpu-slurm", *JOBS])
def test_scripts_pass_shellcheck(portable, name):
    texts = texts_of(name) if name in JOBS else scripts(training_job(name, 4, 1), Site.load(name))
    for text in texts.values():
        shellcheck(text)


class Bench:
    """A folder with fake Slurm commands, in which generated scripts are run."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.bin = folder, programs(folder / "bin", FAKES)
        (folder / "kit").mkdir()
        monkeypatch.setattr(slurm_script.sys, "executable", str(self.bin / "python"))
        monkeypatch.setattr(slurm_script, "PACKAGE_ROOT", folder / "kit")

    def run(self, job, site):
        """Runs all scripts of a job, which must succeed. Returns (arguments, environment, working
        directory) of rank 0.
        """
        run_dir = Path(job.run_dir)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        Path(job.working_directory).mkdir(parents=True, exist_ok=True)
        for name, text in scripts(job, site).items():
            (run_dir / name).write_text(text, encoding="utf-8")
            done = self.bash(run_dir, name)
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return told(run_dir)

    def bash(self, run_dir, *words):
        given = {"USER": "me", "HOME": str(self.folder), "HF_TOKEN": "inherited"}
        job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[1-2]"}
        environment = {"PATH": os.environ["PATH"], **given, **job}
        return subprocess.run(
            ["bash", *words], cwd=run_dir, env=environment, capture_output=True, text=True
        )


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def small_job(bench, *words, name="small", num_nodes=2, num_processes=4, **changes):
    folder, argv = bench.folder, words or (str(bench.bin / "probe"), "a", "b c")
    given = {"run_dir": str(folder / "run"), "working_directory": str(folder / "work"), **changes}
    size = {"num_nodes": num_nodes, "num_processes": num_processes}
    return JobSpec(name=name, argv=argv, **size, **given)


def test_ranks_get_their_numbers_and_master_address(bench):
    job = small_job(bench, environment={"NCCL_NET": "mine"})
    argv, variables, cwd = bench.run(job, Site.load("perlmutter"))
    assert (argv, cwd) == (["a", "b c"], job.working_directory)
    assert variables["NCCL_NET"] == "mine", "the job's own variables win over the site's"
    assert variables["HF_TOKEN"] == "inherited"
    for rank in range(4):
        _, variables, _ = told(Path(job.run_dir), rank)
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE KIT_ATTEMPT".split()
        place = " ".join(variables[name] for name in names)
        assert place == f"{rank} {rank % 2} 4 2 3"
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node1", "20042")
        log = Path(job.run_dir) / "logs" / "attempt_03" / f"rank_{rank:05d}.log"
        assert log.read_text() == f"attempt 3 rank {rank} at node1\n"


def test_frontier_runs_environment_from_node_disk(bench):
    packed, archive = bench.folder / "packed" / "bin", bench.folder / "environment.tar"
    packed.mkdir(parents=True)
    (packed / "conda-unpack").write_text("#!/bin/bash\ntouch bin/unpacked\n")
    keeper = '[ "$1" = -I ] || exec "$@"\nwhile [[ $1 == -? ]]; do shift; done\nshift 2'
    (packed / "python").write_text(f'#!/bin/bash\n{keeper}\nexec "$@"\n')
    for file in packed.iterdir():
        file.chmod(0o755)
    subprocess.run(["tar", "-cf", archive, "-C", packed.parent, "bin"], check=True)
    broadcast = Broadcast(directory=f"{bench.folder}/$USER/disk", archive=str(archive))
    job = small_job(bench, "/elsewhere/bin/python3.11", str(bench.bin / "probe"))
    _, variables, _ = bench.run(job, with_slurm(FRONTIER, broadcast=broadcast))
    assert variables["PATH"].startswith(f"{bench.folder}/me/disk/bin:")
    assert (bench.folder / "me" / "disk" / "bin" / "unpacked").exists()
    assert "rccl-net-plugin" in (Path(job.run_dir) / "modules").read_text()


def compiled_in(**places):
    return with_slurm(TRN1, compilation=TRN1.slurm.compilation.replace(**places))


def test_trainium_compiles_first_then_uses_node_cache(bench):
    shared, local = bench.folder / "fsx", bench.folder / "local"
    site = compiled_in(shared_cache=f"{shared}/$USER", node_cache=f"{local}/$USER")
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
    found = {str(file.relative_to(logs)) for file in logs.rglob("*.log")}
    ranks = [f"rank_{rank:05d}.log" for rank in range(4)]
    assert found == {f"{phase}{rank}" for phase in ("compile_", "attempt_03/") for rank in ranks}


def test_run_without_compiled_cache_is_refused(bench):
    site = compiled_in(shared_cache=str(bench.folder / "nothing"))
    (bench.folder / "run").mkdir()
    done = bench.bash(bench.folder / "run", "-c", scripts(small_job(bench), site)["submit.sh"])
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
def test_hostile_values_reach_ranks_unexecuted(bench, name, folder, argv, environment):
    job = small_job(
        bench,
        str(bench.bin / "probe"),
        *argv,
        name=name,
        run_dir=str(bench.folder / f"run {folder}"),
        working_directory=str(bench.folder / f"work {folder}"),
        environment=environment,
        num_processes=1,
        num_nodes=1,
    )
    site = Site.load("perlmutter")
    got_argv, variables, cwd = bench.run(job, site)
    assert (got_argv, cwd) == (argv, job.working_directory)
    assert {key: variables[key] for key in environment} == environment
    assert variables["KIT_RUN_DIR"] == job.run_dir
    assert not list(bench.folder.rglob("canary*")), "a value ran as a command"
    plain = small_job(bench, num_processes=1, num_nodes=1)
    ours, plain = (directives(render(each, site)) for each in (job, plain))
    assert {**ours, "--job-name": ""} == {**plain, "--job-name": ""}


RESEMBLING = (
    "TOKENIZERS_PARALLELISM MAX_TOKENS MONKEY_BARS KEYBOARD SECRETARY LD_LIBRARY_PATH PYTHONPATH"
    " OLDPWD AUTHOR SSH_AUTH_SOCK XAUTHORITY CUDA_COMPAT_PATH CUDA_COMPAT COMPASS BYPASS NCCL_DEBUG"
).split()


def test_variables_that_resemble_secrets_are_exported():
    job = training_job("run", 4, 1, environment=dict.fromkeys(RESEMBLING, "1"))
    script = scripts(job, Site.load("perlmutter"))["submit.sh"]
    assert all(f"export {name}=1" in script for name in RESEMBLING)


SINGULARITY = ("singularity", "exec", "--rocm", "-B", "/scratch,/project", "/path/image.sif")
PYXIS = ("--container-image=/scratch/nemo.sqsh", "--container-mounts=/scratch:/scratch")


def test_master_address_is_read_from_task_setup_block(portable):
    lines = ("if true; then", "    export MASTER_ADDR=node1", "else", "    exit 1", "fi", "exit 1")
    site = with_slurm(FRONTIER, broadcast=None, task_setup=lines)
    text = scripts(training_job("run", 16, 2), site)["submit.sh"]
    body = text[text.index("set_task_addresses() {") : text.index("export -f set_task_addresses")]
    script = f'{body}\nset_task_addresses; echo "$MASTER_ADDR"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("node1\n", "")


def test_singularity_runs_ranks_and_array_tasks(portable):
    """The command of a rank begins with the container command of the site, and uses the Python of
    the container. The host's PYTHONPATH is replaced. The keepers of the ranks run on the host.
    """
    given = {"container": SINGULARITY, "environment": {"PYTHONPATH": "/extra"}}
    site = with_slurm(FRONTIER, broadcast=None, **given)
    job = training_job("run", 16, 2)
    text = scripts(job, site)["submit.sh"]
    start = "singularity exec --rocm -B /scratch,/project /path/image.sif python3 -P -m"
    assert f"exec {start} kit.train --run /shared/runs/run\n" in text
    assert f"{start} cluster.slurm.container /shared/runs/run\n" in text
    assert "export PYTHONNOUSERSITE=1 PYTHONPATH=/shared/kit:/extra\n" in text
    keeper = "/shared/environment/bin/python -I -u -S /shared/kit/cluster/start.py"
    assert f"{keeper} cluster.slurm.rank bash -c run_rank\n" in text
    shellcheck(text)
    array = slurm.array_script(job, site, 3)
    assert f'exec {start} kit.train --run /shared/runs/run "$SLURM_ARRAY_TASK_ID/3"' in array
    shellcheck(array)


def test_pyxis_container_runs_ranks_and_keepers(portable):
    site = with_slurm(FRONTIER, broadcast=None, srun_options=PYXIS)
    text = scripts(training_job("run", 16, 2), site)["submit.sh"]
    assert " ".join(PYXIS) in text
    assert "python3 -I -u -S /shared/kit/cluster/start.py cluster.slurm.rank bash -c" in text
    assert "exec python3 -P /shared/kit/cluster/start.py kit.train --run" in text
    assert 'cd "$KIT_RUN_DIR" || exit\n' in text and "cd /shared/work" not in text
    supervisor = "/shared/environment/bin/python -I -u /shared/kit/cluster/start.py"
    assert f"exec {supervisor} cluster.slurm.supervisor" in text
    array = slurm.array_script(training_job("run", 8, 1), site, 3)
    assert f"exec srun --nodes=1 --ntasks=1 {' '.join(PYXIS)} python3 -P" in array
    shellcheck(text)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"container": SINGULARITY, "launcher": "torchrun"}, "site.slurm.launcher"),
        ({"srun_options": PYXIS, "launcher": "torchrun"}, "site.slurm.launcher"),
        ({"srun_options": PYXIS, "container": SINGULARITY}, "site.slurm.container"),
    ],
)
def test_contradictory_container_options_are_refused(changes, field):
    with pytest.raises(ConfigError, match=field):
        scripts(training_job("run", 16, 2), with_slurm(FRONTIER, **changes))
