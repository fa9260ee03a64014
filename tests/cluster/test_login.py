"""Jobs of the simulated Slurm cluster, started through a real sshd from a process that has no Slurm
commands.
"""

import json
import os
import shutil
import socket
import stat
import sys
import time
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kit
from cluster import submission
from cluster.interpreter import module_command
from cluster.job import Job
from cluster.login import connection, mirror
from cluster.login.connection import NoConnectionError
from cluster.login.submit import attach, check_remote_paths, source_archive
from cluster.record import ConfigError
from cluster.render import render
from cluster.site import RemotePaths, Site
from cluster.state import Event, JobError, JobState
from kit import launcher
from kit.cli.app import app
from kit.errors import CheckpointError, RunError
from kit.evaluate.follow import follow_run
from kit.monitor.dashboard import Dashboard
from kit.monitor.on_alert import AlertCommand
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from tests.cluster.jobs import standin, with_slurm
from tests.cluster.shell import programs
from tests.support.recorded_runs import recorded_run
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
DEMO = {
    "spec": kit.ModelSpec.preset("demo"),
    "plan": kit.Plan(global_batch_size=2, micro_batch_size=1),
}


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def behind(site, login_node, tmp_path):
    """The site of the simulated cluster, reached through its login node."""
    there = RemotePaths(python=sys.executable, folder=str(tmp_path / "there"), source=str(ROOT))
    return site.replace(login="frontier", there=there)


def lone(run_dir):
    """Returns a job specification with one rank that runs for about half a minute."""
    return standin(run_dir, 500, 0.05, num_processes=1)


def test_job_behind_a_login_node_end_to_end(behind, login_node, tmp_path):
    """Tested in this order: launch, status, lost connection, reconnection, stop from a second
    laptop, requeue, cancel, and deletion of the remote directory.
    """
    here, there = tmp_path / "laptop" / "run", tmp_path / "there" / "run"
    job = submission.submit(lone(here), behind)
    assert (there / "submit.sh").exists() and not (here / "submit.sh").is_symlink()
    assert [Site.read(at / "site.json").login for at in (there, here)] == [None, "frontier"]
    assert eventually(lambda: (job.status().step or 0) > 2), job.status()
    assert "attempt 1 rank 0 from step 0" in job.logs()
    with pytest.raises(JobError, match="in use"):
        submission.submit(lone(here), behind)

    login_node.off()
    with pytest.raises(NoConnectionError, match="Open a connection"):
        submission.submit(lone(tmp_path / "laptop" / "late"), behind)
    assert not (tmp_path / "laptop" / "late").exists()
    step = job.status().step or 0
    assert eventually(lambda: "s ago: no connection to frontier" in job.status().reason)
    status = job.status()
    assert status.state is JobState.RUNNING and "ssh" in status.reason and "-fN" in status.reason
    with pytest.raises(NoConnectionError, match="Open a connection: `ssh -F .* -fN -- frontier`"):
        job.stop()
    login_node.on()
    assert eventually(lambda: (job.status().step or 0) > step)
    assert eventually(lambda: "no connection" not in job.status().reason)

    second = attach(tmp_path / "other" / "run", behind, str(there))
    second.stop()
    assert eventually(lambda: job.status().state is JobState.DONE), job.status()
    assert [event.state for event in job.history][-1] == "done"
    job.requeue()
    assert eventually(lambda: second.status().attempt == 2 and second.state is JobState.RUNNING)
    job.cancel()
    assert eventually(lambda: second.status().state.is_final), second.status()
    # The last processes of the job may still write into the directory, so deletion is repeated.
    assert eventually(lambda: shutil.rmtree(there, ignore_errors=True) or not there.exists())
    assert eventually(lambda: "not there any more" in job.status().reason), job.status()
    assert "attempt 1 rank 0 from step 0" in job.logs(attempt=1)


def test_failure_behind_a_login_node_has_a_reason(behind, login_node, tmp_path):
    site = with_slurm(behind, setup=("source /nowhere/activate env",))
    job = submission.submit(lone(tmp_path / "laptop" / "run"), site)
    assert eventually(lambda: job.state.is_final), job.status()
    status = job.status()
    assert status.state is JobState.FAILED
    assert "setup: source /nowhere/activate env failed with code 1" in status.reason
    assert "kit: setup: source /nowhere/activate env" in job.logs()
    assert job.find_logs()[0].startswith(str(job.run_dir / "logs" / "slurm-"))


def test_job_is_attachable_after_lost_submit_answer(behind, tmp_path, monkeypatch):
    here, ask = tmp_path / "laptop" / "run", mirror.Mirror.send_request

    def cut(self, **request):
        answer = ask(self, **request)
        if request["do"] == "submit":
            raise NoConnectionError("frontier did not answer")
        return answer

    monkeypatch.setattr(mirror.Mirror, "send_request", cut)
    with pytest.raises(NoConnectionError, match="Whether the job was taken: `kit status`"):
        submission.submit(lone(here), behind)
    job = Job.attach(here)
    assert eventually(lambda: job.status().step), job.status()
    job.cancel()


def test_training_run_is_launched_through_login_node(behind, tmp_path):
    """Dataset and checkpoints exist only on the cluster. The scripts contain paths of the
    cluster.
    """
    here, there = tmp_path / "laptop" / "run", tmp_path / "there" / "run"
    data = tmp_path / "there" / "data"
    data.mkdir(parents=True)
    recipe = kit.Recipe(data=str(data), num_steps=5, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="'data/demo' is read on frontier"):
        kit.launch(here, **DEMO, recipe=recipe.replace(data="data/demo"), site=behind)
    run = kit.launch(here, **DEMO, recipe=recipe, site=behind)
    run.job.cancel()
    assert eventually(lambda: run.job.status().state.is_final), run.job.status()
    assert kit.Run.open(there).recipe == kit.Run.open(here).recipe and run.is_elsewhere
    told = render(launcher.job_spec(run), run.site)
    assert told == (there / "submit.sh").read_text(), "as it is shown before"
    assert str(there) in told and str(here) not in told
    checkpoint = there / "checkpoints" / "step_00000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"time": 1e9}')
    assert eventually(lambda: run.job.status() and run.checkpoints.steps() == [5])
    # The value is the time in the checkpoint's manifest, not the time of this query.
    assert eventually(lambda: run.job.status() and run.checkpoints.saved_at(5) == 1e9)
    with pytest.raises(CheckpointError, match=r"step 5 stays on frontier: /.*/there/run"):
        run.checkpoints.manifest(5)
    with pytest.raises(RunError, match="finished its 5 steps"):
        kit.launch(here, **DEMO, recipe=recipe, site=behind)
    with pytest.raises(ConfigError, match="behind a login node, and are scored by jobs there"):
        next(follow_run(run, ("heldout",), submit=True))


def test_site_init_through_a_login_node(behind, tmp_path):
    file = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["site", "init", str(file), "--login", "frontier"])
    assert done.exit_code == 0, (done.output, done.exception)
    site = Site.load(str(file))
    assert (site.name, site.login) == ("sandbox", "frontier") and "/EDIT/runs" in done.output


def with_python(site, python):
    return site.replace(there=site.there.replace(python=str(python)))


def test_refused_remote_submission_leaves_no_files(behind, tmp_path):
    taken, laptop = tmp_path / "there" / "taken", tmp_path / "laptop"
    taken.mkdir(parents=True)
    (taken / "thesis.tex").touch()
    with pytest.raises(JobError, match="frontier: .*taken exists there already"):
        submission.submit(lone(laptop / "taken"), behind)
    with pytest.raises(ConfigError, match="is not on frontier"):
        check_remote_paths(behind, [f"{tmp_path}/nowhere"], "torch")
    with pytest.raises(JobError, match="frontier: exit code 12[67].*no/python"):
        submission.submit(lone(laptop / "run"), with_python(behind, "/no/python"))
    assert not laptop.exists()


def test_remote_python_without_torch_is_refused(behind, tmp_path):
    """The launch is refused before the job is queued. If environment, setup or modules of the site
    may provide torch, only the job itself checks for torch.
    """
    venv.create(tmp_path / "bare", symlinks=True)
    data, here = tmp_path / "there" / "data", tmp_path / "laptop" / "run"
    data.mkdir(parents=True)
    bare = with_python(behind, tmp_path / "bare" / "bin" / "python")
    recipe = kit.Recipe(data=str(data), num_steps=5, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"there.python: .*/bin/python on frontier has no torch"):
        kit.launch(here, **DEMO, recipe=recipe, site=bare)
    assert not here.exists() and [path.name for path in data.parent.iterdir()] == ["data"]
    check_remote_paths(behind, [str(data)], "torch")
    for own in (
        {"environment": {"PYTHONPATH": "/opt/torch"}},
        {"setup": ("source env.sh",)},
        {"modules": ("torch",)},
    ):
        check_remote_paths(bare.replace(slurm=bare.slurm.replace(**own)), [str(data)], "torch")


def test_missing_remote_run_directory_is_reported(pair, tmp_path):
    """There are two errors: one for a path where no run ever was, and one for a run that was
    deleted.
    """
    there, here = pair
    with pytest.raises(JobError, match="/never is no run directory there"):
        mirror_at(tmp_path / "never").send_request(do="status")
    (there / "job.json").unlink()
    with pytest.raises(JobError, match="not there any more .* What was copied before is kept"):
        fetch(here)


def test_unknown_host_and_closed_port_errors_differ(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Host closed\n HostName 127.0.0.1\n Port {port}\nHost unknown\n HostName nowhere.invalid\n"
    )
    monkeypatch.setenv("KIT_SSH_CONFIG", str(tmp_path / "config"))
    told = {"closed": "Connection refused.*Port", "unknown": "resolve hostname.*HostName"}
    for name, first in told.items():
        with pytest.raises(
            NoConnectionError, match=f"{first} in ~/.ssh/config. Open a connection: "
        ):
            connection.ssh(name, "true")


@pytest.fixture
def same_machine(tmp_path, monkeypatch):
    """A fake ssh that runs the remote command on this machine, with umask 0."""
    fake = """
case " $* " in *" -G "*) exit 1 ;; esac
echo "$@" >> "$0.calls"
while [ "$1" != frontier ]; do shift; done
shift
umask 0
[ -e "$0.off" ] && { echo "ssh: no route to frontier" >&2; exit 255; }
case "$*" in rsync*) ;; *) echo "Welcome to Frontier!" ;; esac
exec bash -c "$*"
"""
    ssh = programs(tmp_path / "bin", {"ssh": fake}) / "ssh"
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return ssh


@pytest.fixture
def next_door(same_machine, tmp_path):
    """A site whose login node is this machine, reached by the fake ssh."""
    there = RemotePaths(python=sys.executable, folder=str(tmp_path / "there"), sync=True)
    site = Site.load("laptop").replace(scheduler="slurm", login="frontier", name="mine")
    return site.replace(there=there)


def test_source_is_sent_once_into_a_private_folder(next_door, tmp_path):
    """The second command sends no source again. A source folder that another user owns or can write
    to is refused.
    """
    check_remote_paths(next_door, [], "torch")
    (folder,) = (file.parents[2] for file in tmp_path.glob("there/*/*/cluster/login/answer.py"))
    sent = folder.stat().st_ctime_ns
    check_remote_paths(next_door, [], "torch")
    assert folder.stat().st_ctime_ns == sent and source_archive() == source_archive()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "kit" / "train.py").exists()
    pwned = tmp_path / "pwned"
    (folder / "cluster" / "login" / "answer.py").write_text(f"open({str(pwned)!r}, 'w')")
    theirs = [lambda: folder.chmod(0o770), lambda: folder.chmod(0o707)]
    if os.geteuid() == 0:
        theirs.append(lambda: folder.chmod(0o700) or os.chown(folder, 65534, 65534))
    mine = mirror_at("/run").replace(source=str(folder)).own()
    for done in theirs:
        done()
        for asks in (
            lambda: check_remote_paths(next_door, [], "torch"),
            lambda: mine.send_request(do="stop"),
        ):
            with pytest.raises(JobError, match=f"{folder} is no folder that you alone can write"):
                asks()
        assert not pwned.exists()


def test_remote_scripts_name_no_local_path():
    """The text of the scripts that advises on many nodes names no local path either. No login node
    is contacted.
    """
    there = RemotePaths(python="/opt/env/bin/python", folder="/project/runs", source="/opt/kit")
    site = Site.load("generic-gpu-slurm").replace(login="nowhere", there=there)
    job = lone(ROOT / "run").replace(num_nodes=20, num_processes=20)
    told = render(job.replace(argv=module_command("kit.train", "--run", job.run_dir)), site)
    assert "tar -C /opt/env -cf" in told
    assert (
        "exec /opt/env/bin/python -P /opt/kit/cluster/start.py kit.train --run /project/runs/run"
        in told
    )
    assert str(ROOT) not in told and str(Path(sys.executable).parent) not in told


def test_site_file_source_may_be_writable_by_others(next_door, tmp_path):
    source = tmp_path / "opt" / "kit"
    shutil.copytree(ROOT / "cluster", source / "cluster")
    source.chmod(0o777)
    there = next_door.there.replace(sync=False, source=str(source))
    check_remote_paths(next_door.replace(there=there), [], "torch")


@pytest.fixture
def pair(same_machine, tmp_path):
    """Returns (run directory on the cluster, its local mirror), both empty except for the job and
    login files.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there / "logs" / "attempt_01", here):
        folder.mkdir(parents=True)
    lone(there).write(there / "job.json")
    mirror_at(there).write(here / "login.json")
    return there, here


def mirror_at(directory):
    return mirror.Mirror(
        login="frontier", python=sys.executable, source=str(ROOT), directory=str(directory)
    ).own()


def fetch(here):
    mirror.fetch(here, mirror.Mirror.read(here / "login.json"))


def line(step, loss=2.5):
    row = {"step": step, "loss": loss, "grad_norm": 1.25, "tokens": 4096, "step_time_s": 0.5}
    return json.dumps({**row, "attempt": 1}) + "\n"


def append(file, text):
    with file.open("a") as stream:
        stream.write(text)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_fetch_appends_replaces_and_removes_files(pair):
    """Alerts from the cluster and from this machine are merged. Files that exist only in the local
    mirror are kept.
    """
    there, here = pair
    theirs = {"metrics.jsonl": line(1), "plan.json": "{}", "control/request_stop": ""}
    write(there, {**theirs, "alerts.jsonl": "theirs\n"})
    write(here, {"alerts.jsonl": "ours\n", "notes.json": "mine"})
    fetch(here)
    inode = (here / "metrics.jsonl").stat().st_ino
    append(there / "metrics.jsonl", line(2) + '{"step": 3')
    append(there / "alerts.jsonl", 'more\n{"torn')
    (there / "plan.json").write_text("[]")
    (there / "control" / "request_stop").unlink()
    for _ in range(2):
        fetch(here)
    grown = here / "metrics.jsonl"
    assert grown.read_text() == line(1) + line(2) + '{"step": 3' and grown.stat().st_ino == inode
    assert (here / "alerts.jsonl").read_text().split() == ["ours", "theirs", "more"]
    assert (here / "plan.json").read_text() == "[]" and (here / "notes.json").exists()
    assert not (here / "control" / "request_stop").exists()


def test_fetch_replaces_metrics_of_a_different_run(pair):
    there, here = pair
    for text, began in ((line(1) + line(2), 1.0), (line(3), 2.0)):
        event = Event(time=began, attempt=1, state=JobState.RUNNING)
        (there / "history.jsonl").write_text(f"{json.dumps(event.to_dict())}\n")
        (there / "metrics.jsonl").write_text(text)
        fetch(here)
        assert (here / "metrics.jsonl").read_text() == text


def test_logs_are_fetched_on_demand(pair):
    there, here = pair
    (there / "logs" / "attempt_01" / "node_0.log").write_bytes(b"caf\xc3\xa9 \xff\n")
    end = {"attempt": 1, "rc": 0, "reason": "done", "host": "n", "time": 1.0}
    (there / "exit.json").write_text(json.dumps(end))
    fetch(here)
    assert not list(here.glob("logs/*/*"))
    assert Job.attach(here).logs() == Job.attach(there).logs() == "café �\n"


def test_runs_of_one_login_share_one_failed_connection(pair, same_machine):
    _, here = pair
    other, calls = here.with_name("other"), same_machine.with_suffix(".calls")
    shutil.copytree(here, other)
    same_machine.with_suffix(".off").touch()
    told = [Job(folder, lone(folder)).status().reason for folder in (here, other)]
    assert all("no route to frontier" in reason for reason in told)
    assert len(calls.read_text().splitlines()) == 1


def test_mirror_of_another_user_runs_no_command(pair, same_machine):
    _, here = pair
    strange = mirror.Mirror.read(here / "login.json").replace(python="/tmp/theirs")
    strange.write(here / "login.json")
    assert "somebody else made this mirror" in Job(here, lone(here)).status().reason
    assert not same_machine.with_suffix(".calls").exists()


def test_fetch_follows_no_link_on_either_side(pair, tmp_path):
    """A link in the local mirror is replaced, and its target stays unchanged. A metrics.jsonl that
    is a link or has further hard links is refused. Links in the remote run are not fetched.

    Remote files do not replace login.json, which says to which remote run the local mirror belongs.
    Neither site.json nor hidden files are fetched.
    """
    there, here = pair
    mine, names = tmp_path / "mine", ("state.json", "metrics.jsonl", "logs/attempt_01/x.log")
    write(mine, dict.fromkeys((*names, "ranks/x.json"), "kept"))
    own = ("site.json", "login.json", "login_seen.json", ".hidden.json")
    write(there, dict.fromkeys((*names, *own), "theirs"))
    for name in ("plan.json", "eval"):
        (there / name).symlink_to(mine / "state.json")
    for name in ("state.json", "ranks", "logs"):
        (here / name).symlink_to(mine / name)
    before = (here / "login.json").read_bytes()
    for link, why in ((os.link, "a file with other names"), (os.symlink, "a link")):
        link(mine / "metrics.jsonl", here / "metrics.jsonl")
        with pytest.raises(OSError, match=why):
            fetch(here)
        (here / "metrics.jsonl").unlink()
    fetch(here)
    assert (here / "state.json").read_text() == (here / "metrics.jsonl").read_text() == "theirs"
    assert (here / "login.json").read_bytes() == before
    assert not {"site.json", ".hidden.json", "plan.json", "eval"} & {*os.listdir(here)}
    kept = [file for file in mine.rglob("*") if file.is_file()]
    assert len(kept) == 4 and {file.read_text() for file in kept} == {"kept"}


def test_alerts_missed_while_offline_are_reported_once(pair, tmp_path, monkeypatch):
    """`on_alert` runs once for each alert. An alert is written by the cluster or is found in the
    fetched steps. A restarted watcher repeats no alert.
    """
    _, here = pair
    there = recorded_run(tmp_path / "cluster", steps=40).directory
    for name in ("spec", "plan", "recipe", "site"):
        shutil.copy(there / f"{name}.json", here)
    mirror_at(there).write(here / "login.json")
    monkeypatch.setattr(mirror, "INTERVAL_S", 0.0)
    told = tmp_path / "told"
    config = Path(os.environ["XDG_CONFIG_HOME"]) / "kit" / "config.toml"
    config.write_text(f"on_alert = 'echo \"$KIT_MESSAGE\" >> {told}'")

    def watching():
        dashboard = Dashboard(Run.open(here))
        on_alert = AlertCommand(dashboard.run, dashboard.run_view.alert_monitor.log)

        def look():
            dashboard.read()
            dashboard.update_status()
            on_alert.run_for_new_alerts()
            return len(dashboard.columns)

        return look

    look = watching()
    assert eventually(lambda: look() == 40) and not told.exists()

    now = time.time()
    slow = Alert(
        kind="straggler", level="warning", message="rank 1 is slow", attempt=1, step=41, time=now
    )
    AlertLog(there / "alerts.jsonl").add([slow])
    append(there / "metrics.jsonl", line(41, loss=float("nan")))

    def are_told():
        text = look() and told.exists() and told.read_text()
        return text and "is slow" in text and "loss" in text

    assert eventually(are_told)
    again = watching()  # A new watcher, as `kit watch RUN` after a reboot.
    assert eventually(lambda: again() == 41)
    assert len(told.read_text().splitlines()) == 2


def test_open_command_quotes_host_and_sets_master(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("Host frontier\n HostName 127.0.0.1\n")
    monkeypatch.setenv("KIT_SSH_CONFIG", str(tmp_path / "config"))
    # A host name that begins with a hyphen is not passed to ssh as an option.
    told = connection.open_command("-oProxyCommand=touch x")
    assert told.endswith(" -- '-oProxyCommand=touch x'")
    master = "-fN -o ControlMaster=yes -o 'ControlPath=~/.ssh/kit-%C'"
    assert connection.open_command("frontier").startswith(f"ssh -F {tmp_path}/config {master}")
