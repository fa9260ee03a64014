"""Working directory and environment of the launching process do not change which modules the job's
processes import.
"""

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kit
from cluster.start import PACKAGES
from cluster.state import JobState
from kit.config.plan import Plan
from kit.data.workers import BuildProgress, Workers
from kit.run import Run
from tests.cluster.jobs import with_slurm
from tests.support.sources import ROOT

NAMES = "token random queue torch tokenizers typing_extensions numpy json tests numbers".split()
"""Names of modules of the standard library, and of packages that ranks and dataset builds
import.
"""
USERS_FILE = """
import os
with open({marker!r}, "a") as imported:
    imported.write(__file__ + " " + str(os.getpid()) + "\\n")
raise ImportError("a file of the user was imported: " + __file__)
"""


@pytest.fixture
def users_folder(tmp_path, monkeypatch) -> Path:
    """The working directory: a folder of a user, whose files have the names of standard modules, of
    installed packages and of the kit.
    """
    folder = tmp_path / "work"
    text = USERS_FILE.format(marker=str(tmp_path / "imported"))
    for name in NAMES:
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def kit_command(users_folder, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs the `kit` command in the user's folder, and checks that no file
    of this folder was imported.
    """
    script = "import sys; from kit.__main__ import main; sys.exit(main())"

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", script, *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        imported = tmp_path / "imported"
        assert not imported.exists(), imported.read_text()
        return done

    return run


def launch(kit_command, tiny_dataset, directory: Path, *words: str) -> Run:
    """Launches a run of two steps with the `kit` command and returns the run. The command must warn
    that a folder in PYTHONPATH shadows a module.
    """
    shadowing = directory.parent / "shadowing"
    shadowing.mkdir()
    (shadowing / "mailbox.py").write_text("")
    variables = {"PYTHONPATH": f"{shadowing}:{ROOT}"}
    sizes = ("spec.num_layers=2", f"spec.vocab_size={tiny_dataset.vocab_size}")
    settings = [word for pair in sizes for word in ("--set", pair)]
    data = ("--data", str(tiny_dataset.directory), "--steps", "2")
    done = kit_command("launch", str(directory), *data, *settings, *words, **variables)
    assert done.returncode == 0, done.stderr
    assert f"In the ranks too, mailbox comes from {shadowing}" in " ".join(done.stderr.split())
    return Run.open(directory)


@pytest.mark.parametrize("ranks", [1, 2])
def test_local_ranks_ignore_modules_in_cwd(kit_command, tiny_dataset, tmp_path, ranks):
    """With one rank, the rank is started as a new process. With several ranks, the ranks are
    forked.
    """
    layout = ("--set", f"plan.data_parallel={ranks}")
    run = launch(kit_command, tiny_dataset, tmp_path / "run", *layout)
    assert run.job.wait(120).state is JobState.DONE, run.job.logs()
    assert kit_command("status", str(run.directory)).returncode == 0
    facts = json.loads((run.directory / "env.json").read_text())
    assert facts["shadowed_modules"] == {"mailbox": str(tmp_path / "shadowing")}


def test_build_workers_ignore_modules_in_cwd(users_folder, tmp_path):
    workers = Workers(2, BuildProgress(shown=False))
    # The second operand is the function with which a worker reports its progress.
    answers = workers.map("test", operator.is_, [("a",), ("b",)], [1, 1])
    assert answers == [False, False] and not (tmp_path / "imported").exists()


def test_slurm_ranks_ignore_modules_in_cwd(kit_command, sandbox, site, tiny_dataset, tmp_path):
    layout = ("--set", "plan.data_parallel=4", "--site", str(sandbox.site_file))
    run = launch(kit_command, tiny_dataset, tmp_path / "run", *layout)
    assert run.job.wait(200).state is JobState.DONE, run.job.logs()
    assert not (tmp_path / "imported").exists()


def test_failure_reason_names_a_shadowed_module(sandbox, site, spec, recipe, tmp_path):
    """The site file sets PYTHONPATH, as an environment module that is loaded only in the job would
    do.
    """
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('an old numpy')\n")
    run = kit.launch(
        tmp_path / "run",
        spec=spec,
        plan=Plan(global_batch_size=4, micro_batch_size=4),
        recipe=recipe,
        site=with_slurm(site, environment={"PYTHONPATH": str(tmp_path)}),
    )
    status = run.job.wait(120)
    assert status.state is JobState.FAILED
    assert f"numpy comes from {tmp_path}, set by PYTHONPATH" in status.reason


SINGULARITY = r"""#!/bin/bash
# singularity exec OPTIONS... IMAGE COMMAND...: the folders named in the file IMAGE and those of -B,
# with nothing else of this machine but its system. PATH is the image's.
set -e
[ "$1" = exec ] && shift
while [[ $1 = -* ]]; do
    [ "$1" != -B ] || { binds=$2; shift; }
    shift
done
image=$1 root=$(mktemp -d)
shift
export binds image root
exec unshare --mount --propagation private bash -ec '
    mount -t tmpfs container "$root"
    show() { mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; }
    for folder in /usr /etc /proc /dev /sys; do show "$folder"; done
    for folder in /bin /lib /lib32 /lib64 /sbin; do
        if [ -L "$folder" ]; then cp -P "$folder" "$root$folder"; continue; fi
        [ ! -e "$folder" ] || show "$folder"
    done
    mkdir -m 1777 "$root/tmp"
    while read -r folder; do show "$folder"; done < "$image"
    for folder in ${binds//,/ }; do show "$folder"; done
    read -r bin < "$image"
    program=$(PATH=/usr/sbin:/usr/bin:/sbin command -v chroot)
    PATH=$bin:/usr/bin:/bin exec "$program" "$root" "$@"
' container "$@"
"""
HOOK = """
import os
from beside_the_hook import names

def on_step(state):
    return {"is_inside": float(not os.path.exists(UNBOUND)), "names": float(names())}
"""


@pytest.fixture
def container(tmp_path, monkeypatch) -> Callable[..., tuple[str, ...]]:
    """Returns a function that takes the folders to bind, and returns a value of
    `site.slurm.container`. The container image holds this Python environment, without the kit.
    """
    programs, image = tmp_path / "programs", tmp_path / "image.sif"
    programs.mkdir()
    (programs / "singularity").write_text(SINGULARITY)
    (programs / "singularity").chmod(0o755)
    folder = tmp_path / "image" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    packages = {path for path in sys.path if path.endswith("site-packages")}
    shown = [str(folder), *sorted({sys.prefix, sys.base_prefix, *packages})]
    image.write_text("\n".join(shown) + "\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return lambda *binds: ("singularity", "exec", "-B", ",".join(map(str, binds)), str(image))


def test_ranks_train_in_a_container(
    sandbox, site, spec, recipe, tiny_dataset, container, users_folder, tmp_path, monkeypatch
):
    """The job has two nodes. The user's hook, which runs in the ranks, cannot see a folder that is
    not bound, and can import the module beside the hook. PYTHONPATH of the submitting shell does
    not reach the ranks.
    """
    binds = (ROOT / "kit", ROOT / "cluster", tmp_path / "bound", tiny_dataset.directory)
    (tmp_path / "bound").mkdir()
    hook = tmp_path / "bound" / "hook_of_user.py"
    hook.write_text(HOOK.replace("UNBOUND", repr(str(users_folder))))
    text = f"def names(): import os; return os.listdir({str(ROOT)!r}).count('tests')"
    (hook.parent / "beside_the_hook.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(users_folder))
    run = kit.launch(
        tmp_path / "bound" / "run",
        spec=spec,
        plan=Plan(global_batch_size=4, micro_batch_size=1, data_parallel=2),
        recipe=recipe.replace(num_steps=2, warmup_steps=0, hook=str(hook)),
        site=with_slurm(site.replace(devices_per_node=1), container=container(*binds)),
    )
    assert run.job.wait(240).state is JobState.DONE, run.job.logs()
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    seen = [(row.get("hook/is_inside"), row.get("hook/names")) for row in rows]
    assert seen == [(1.0, 0.0), (1.0, 0.0)], (run.directory / "alerts.jsonl").read_text()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("lacking", ["source", "run"])
def test_container_without_a_bind_starts_no_rank(
    sandbox, site, spec, recipe, tiny_dataset, container, tmp_path, lacking
):
    """The reason of the failed job names the folder that is missing in the container: the kit's
    source or the run directory.
    """
    (tmp_path / "bound").mkdir()
    folders = {"source": (ROOT / "kit", ROOT / "cluster"), "run": (tmp_path / "bound",)}
    binds = [path for name, paths in folders.items() if name != lacking for path in paths]
    run = kit.launch(
        tmp_path / "bound" / "run",
        spec=spec,
        plan=Plan(global_batch_size=4, micro_batch_size=1, data_parallel=2),
        recipe=recipe,
        site=with_slurm(
            site.replace(devices_per_node=1), container=container(*binds, tiny_dataset.directory)
        ),
    )
    status = run.job.wait(120)
    assert status.state is JobState.FAILED and status.attempt == 1
    said = {"source": "No module named 'cluster'", "run": f"{run.directory} is missing"}
    assert "site.slurm.container does not work" in status.reason and said[lacking] in status.reason
    assert not list(run.directory.glob("logs/attempt_01/rank_*"))
