"""Runs of another user: every command and every view only reads them, even if all users have write
permission.

The run's folders have mode 0777 and its files mode 0666, so file permissions forbid nothing. Only
the kit's own checks prevent a write.
"""

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cluster import poll, submission
from cluster.job import Job
from cluster.login.mirror import Mirror
from cluster.scheduler import Slurm
from cluster.site import Fact, RemotePaths, Site
from cluster.state import JobError, JobState, SchedulerJob, update_state
from kit import launcher
from kit.cli.app import app
from kit.errors import ConfigError, RunError
from kit.evaluate import evaluate
from kit.evaluate.follow import follow_run
from kit.measure.site import remeasure
from kit.monitor.actions import ACTION_NAMES
from kit.monitor.dashboard import Dashboard
from kit.monitor.export import copy_metrics
from kit.monitor.text import recorded_alerts, status_table
from kit.run import Run
from kit.run.metrics import MetricsWriter
from tests.support import hostile
from tests.support.foreign_logs import ARGUMENTS, head, line
from tests.support.hostile import (
    Calls,
    finished_run,
    leaves,
    open_to_all,
    running,
    save_checkpoint,
    tree,
)
from tests.untrusted import planted

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parents[2]
SCORE = "eval RUN --tasks heldout --limit 2 --set batch_tokens=256"
COMMANDS = f"""
look   status RUN
look   status RUN --json
look   status RUN --why
look   watch RUN
look   watch RUN --html OUT/page.html
refuse watch RUN --html RUN/page.html
look   runs FOLDER --json
look   runs FOLDER --compare NAME --out OUT/compare.png
refuse runs RUN --compare .
look   logs RUN
look   logs RUN --follow
look   figure RUN --out OUT/figure.png
refuse figure RUN
look   figure hlat-loss --run RUN --out OUT/paper.png
look   export RUN --out OUT/steps.csv --format csv
refuse export RUN
look   plan RUN --rehearse --site frontier --set plan.data_parallel=8
look   calibrate RUN
look   generate RUN a --tokens 1
look   export RUN --format hf --out OUT/hf
look   average RUN --last 2 --out OUT/average
refuse average RUN --last 2
score  {SCORE}
score  {SCORE} --follow
refuse {SCORE} --follow --submit
refuse launch RUN
refuse launch RUN --steps 99
show   launch RUN --show
refuse resume RUN
refuse resume RUN --steps 99 --set plan.compile=false
taken  launch RUN --there /there/run --site LOGIN
refuse stop RUN
refuse stop RUN --now
refuse checkpoint RUN
refuse export RUN --format tensorboard
refuse bench --apply RUN
refuse import LOG --out RUN --site lumi --format megatron
taken  data build RUN --source TEXT --overwrite
refuse data build RUN --source TEXT --tokenizer TOKENIZER --part all/1 --site SLURM
"""
"""Commands, and the expected result of each on a run of another user.

look: The command shows the run. refuse: The command would have to write, fails, and names the
owner. score: The command scores the run on this machine, or fails like `refuse`. show: The command
shows the run, or says what is missing. taken: The command refuses a directory that is not empty,
whoever owns it.
"""
NEVER_OF_A_RUN = {"validate", "doctor", "eval-data", "site init"}
ALWAYS = ("status", "watch", "runs")
"""Commands that show any run, even an incomplete run. Only the option `--why` needs a run with
steps.
"""


def test_table_of_commands_is_complete() -> None:
    """Add a new command to COMMANDS if it takes a run as argument, and otherwise to
    NEVER_OF_A_RUN.
    """
    words = [row.split()[1:] for row in COMMANDS.strip().splitlines()]
    told = {" ".join(row[:2]) if row[0] in ("data", "site") else row[0] for row in words}
    assert told | NEVER_OF_A_RUN == dict(leaves(typer.main.get_command(app))).keys()
    assert not told & NEVER_OF_A_RUN


# The run, and the user who runs the commands (the viewer) -----------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, spec, tiny_dataset) -> Path:
    """A finished run with a checkpoint. Its model is so small that scoring takes only a moment."""
    directory = tmp_path_factory.mktemp("template") / "run"
    run = finished_run(directory, spec.replace(num_layers=1), str(tiny_dataset.directory))
    save_checkpoint(run, 20)
    save_checkpoint(run)
    return run.directory


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A copy of the template run, which still belongs to the viewer (the user who runs the
    commands).
    """
    copy = shutil.copytree(template, tmp_path / "shared" / "run")
    job = json.loads((copy / "job.json").read_text())
    (copy / "job.json").write_text(json.dumps(job | {"run_dir": str(copy)}))
    return copy


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Fake programs in PATH that record calls which would contact another machine. The viewer's
    home folder is empty.
    """
    fakes = Calls(tmp_path / "bin", tmp_path)
    monkeypatch.setenv("PATH", f"{fakes.bin}:{os.environ['PATH']}")
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return fakes


@pytest.fixture
def give_away(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], str]:
    """Returns a function that gives a folder to another user, writable by all users, and returns
    this user's name. Only root can give a folder away. Without root, or with the parameter True,
    this process pretends to be another user instead.
    """

    def give(folder: Path) -> str:
        if not os.geteuid() and not getattr(request, "param", False):
            open_to_all(folder, hostile.STRANGER)
            return pwd.getpwuid(hostile.STRANGER).pw_name
        open_to_all(folder)
        own, me = pwd.getpwuid(os.getuid()), os.geteuid()
        monkeypatch.setattr("pwd.getpwuid", lambda uid: pwd.struct_passwd(("mallory", *own[1:])))
        monkeypatch.setattr("os.geteuid", lambda: me + 1)
        return "mallory"

    return give


@pytest.fixture
def sleep() -> Iterator[subprocess.Popen]:
    """A running process of the viewer, which no command may end."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


OF_A_CLUSTER = 'base = "generic-gpu-slurm"\nname = "mine"\n'
CODES = {"look": (0,), "refuse": (1,), "score": (0, 1), "show": (0, 1), "taken": (1,)}


class Looks:
    """Runs commands on a run of another user. Returns descriptions of forbidden effects of each
    command.
    """

    def __init__(self, run: Path, tmp_path: Path, calls: Calls, owner: str, dataset: Any) -> None:
        self.run, self.calls, self.owner, self.mine = run, calls, owner, tmp_path / "mine"
        self.out = tmp_path / "out"
        self.out.mkdir()
        steps = line(1, 346.65) + line(2, 346.65)
        files = {
            "train.log": head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2) + steps,
            "login.toml": f'{OF_A_CLUSTER}login = "far"\n[there]\npython = "/usr/bin/python3"\n'
            'folder = "/there"\nsource = "/there/kit"\n',
            "slurm.toml": f'{OF_A_CLUSTER}[slurm]\naccount = "me"\npartition = "all"\n',
        }
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        self.words = {
            "RUN": run,
            "FOLDER": run.parent,
            "NAME": run.name,
            "OUT": self.out,
            "LOG": tmp_path / "train.log",
            "LOGIN": tmp_path / "login.toml",
            "SLURM": tmp_path / "slurm.toml",
            "TEXT": dataset.directory.parent / "text.jsonl",
            "TOKENIZER": dataset.directory / "tokenizer.json",
        }

    def faults(self, row: str, *, whole: bool, live: bool) -> list[str]:
        """Runs one command and returns descriptions of its faults. `whole` says whether the run is
        complete, and `live` whether its job is running.
        """
        expected, *words = row.split()
        given = [self._filled(word) for word in words]
        follows = live and (words[0] == "watch" or "--follow" in words)
        before = [tree(folder) for folder in (self.run, self.mine)]
        said = hostile.kit(*given, ctrl_c_after_s=0.5 if follows else 20.0)
        shutil.rmtree(self.out)
        self.out.mkdir()
        found = []
        for was, folder in zip(before, (self.run, self.mine), strict=True):
            found += [f"it wrote {name}" for name, _ in was.items() ^ tree(folder).items()]
        calls = hostile.beyond_questions(self.calls.taken(), self.run)
        found += [f"it called {call}" for call in calls]
        found += ["a traceback"] if "Traceback" in said.text else []
        codes = CODES[expected]
        if expected == "look" and not whole and (words[0] not in ALWAYS or "--why" in words):
            codes = (0, 1)
        codes = (*codes, 0, 130) if follows and expected != "refuse" else codes
        found += [] if said.code in codes else [f"exit code {said.code}"]
        named = expected == "refuse" or (expected == "score" and said.code == 1 and whole)
        text = " ".join(said.text.split())
        found += [f"{self.owner} is not named"] if named and self.owner not in text else []
        return [f"{' '.join(words)}: {fault}\n    {text[-400:]}" for fault in found]

    def _filled(self, word: str) -> str:
        first, *rest = word.split("/")
        return "/".join([str(self.words.get(first, first)), *rest])


@pytest.fixture
def looks(run: Path, tmp_path: Path, calls: Calls, give_away, tiny_dataset) -> Callable[[], Looks]:
    """Returns a function that gives the run to another user, and returns a `Looks` object for this
    run.
    """
    (tmp_path / "mine").mkdir()
    return lambda: Looks(run, tmp_path, calls, give_away(run), tiny_dataset)


def assert_no_command_at_fault(looks: Looks, *, whole: bool = True, live: bool = False) -> None:
    rows = COMMANDS.strip().splitlines()
    faults = [fault for row in rows for fault in looks.faults(row, whole=whole, live=live)]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


# Commands -----------------------------------------------------------------------------------------


def test_commands_only_read_a_finished_run(looks) -> None:
    assert_no_command_at_fault(looks())


def test_commands_spare_a_named_process_of_the_viewer(looks, run: Path, sleep) -> None:
    """The run's state.json names a process as the process of the job, but the process belongs to
    the user who views the run."""
    running(run, process=hostile.process_of(sleep.pid))
    assert_no_command_at_fault(looks(), live=True)
    assert sleep.poll() is None


def test_commands_run_no_shell_lines_of_the_runs_site(looks, run: Path, tmp_path: Path) -> None:
    """The site's devices are so small that scoring needs a job. The run also names a Slurm job of
    the viewer as its own job.
    """
    canary, base = tmp_path / "canary", Site.load("generic-gpu-slurm")
    few = base.device.__class__(name="one tiny core", memory_bytes=Fact(value=1e5, source="x"))
    lines = (f"touch {canary}",)
    slurm = Slurm(account="a", partition="p", setup=lines, task_setup=lines)
    site = base.replace(slurm=slurm, device=few, devices_per_node=8)
    for name in ("site.json", "site.attempt_01.json"):
        site.write(run / name)
    (run / "slurm.conf").write_text("PluginDir=/tmp/evil\n")
    config = str(run / "slurm.conf")
    running(run, scheduler_job=SchedulerJob(scheduler="slurm", id="777", config=config))
    seen = looks()
    assert_no_command_at_fault(seen, live=True, whole=False)
    said = hostile.kit(*(seen._filled(word) for word in SCORE.split()))
    assert said.code == 1 and seen.owner in said.text
    assert f"touch {canary}" in said.text, "what it would have run"
    assert not canary.exists()


@pytest.mark.parametrize("mirrored", [False, True])
def test_commands_contact_no_login_node_of_the_run(looks, run, tmp_path, mirrored) -> None:
    """With `mirrored`, the run is another user's copy of a local mirror that the viewer has made of
    a remote run.
    """
    there = RemotePaths(python=str(tmp_path / "evil"), folder="/there", source="/there/kit")
    base = Site.load("generic-gpu-slurm").replace(slurm=Slurm(account="a", partition="p"))
    base.replace(login="far", there=there).write(run / "site.json")
    if mirrored:
        at = {"python": there.python, "source": there.source, "directory": "/there/run"}
        mirror = Mirror(login="far", **at)
        mirror.own().write(run / "login.json")
        running(run)
    assert_no_command_at_fault(looks(), whole=False, live=mirrored)


LINKS = ("alerts.jsonl", "history.jsonl", "metrics.jsonl", ".state.lock", ".login.lock")
FOLDERS = ("monitor", "logs/attempt_01", "control", "ranks", "eval")


@pytest.mark.slow
def test_commands_change_no_linked_file_of_the_viewer(looks, run: Path, tmp_path: Path) -> None:
    """The job of the run is stalled, so that every view would write an alert if it could."""
    mine = tmp_path / "mine"
    for name in (*LINKS, *FOLDERS):
        target, link = mine / name.replace("/", "_"), run / name
        target.mkdir() if name in FOLDERS else target.write_text("export MINE=1\n")
        shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
        link.symlink_to(target)
    running(run, heartbeat=time.time() - 3600, notice="$(touch canary)")
    assert_no_command_at_fault(looks(), whole=False, live=True)


# Python functions that read a run ---------------------------------------------------------------


def dashboard(run: Run) -> None:
    shown = planted.dashboard_of(run)
    shown.catch_up()
    assert [alert["kind"] for alert in shown.alerts()] == ["nan"], "it is kept in memory"


def widget(run: Run) -> None:
    pytest.importorskip("anywidget")
    from kit.monitor.widget import Monitor

    shown = Monitor(run)
    time.sleep(0.4)
    shown.close()
    assert not shown.failure


VIEWS: tuple[Callable[[Run], Any], ...] = (
    *planted.VIEWS.values(),
    dashboard,
    widget,
    status_table,
    lambda run: run.metrics().summary(),
)
WRITERS: dict[str, Callable[[Run], Any]] = {
    "stop": lambda run: run.job.stop(),
    "checkpoint": lambda run: run.job.checkpoint(),
    "cancel": lambda run: run.job.cancel(),
    "requeue": lambda run: run.job.requeue(),
    "resume": lambda run: launcher.resume(run.directory, num_steps=99),
    "launch": lambda run: launcher.launch(
        run.directory, spec=run.spec, plan=run.plan, recipe=run.recipe
    ),
    "submit": lambda run: submission.submit(run.job.spec, Site.load("laptop")),
    "sink": lambda run: copy_metrics(run, "tensorboard", follow=False),
    "peak": remeasure,
    "jobs": lambda run: list(follow_run(run, ("heldout",), submit=True, limit=2, poll_s=0)),
}


JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ended": lambda pid: {},
    "here": lambda pid: {"process": hostile.process_of(pid)},
    "in Slurm": lambda pid: {"scheduler_job": SchedulerJob(scheduler="slurm", id="777")},
}


@pytest.mark.parametrize(
    "give_away", [False, True], indirect=True, ids=["two users", "taken for two"]
)
@pytest.mark.parametrize("job", JOBS)
def test_python_api_only_reads_another_users_run(
    run: Path, calls: Calls, give_away, sleep, job: str
) -> None:
    if live := JOBS[job](sleep.pid):
        running(run, **live)
    owner, before, opened = give_away(run), tree(run), Run.open(run)
    for view in VIEWS:
        view(opened)
        assert tree(run) == before, view
    for name, write in WRITERS.items():
        try:
            write(opened)
            assert name in ("stop", "checkpoint", "cancel") and not live, f"{name} was not refused"
        except (ConfigError, RunError, JobError) as error:
            assert owner in str(error), f"{name}: {error}"
        assert tree(run) == before, name
    assert sleep.poll() is None and not hostile.beyond_questions(calls.taken(), run)


def test_scores_of_another_users_run_are_not_kept(run: Path, calls: Calls, give_away) -> None:
    give_away(run)
    before = tree(run)
    assert evaluate(run, tasks=("heldout",), limit=2)["heldout"].headline.value > 0
    assert tree(run) == before


def test_dashboard_buttons_refuse_and_name_the_owner(
    run: Path, calls: Calls, give_away, sleep
) -> None:
    running(run, process=hostile.process_of(sleep.pid))
    owner, before, shown = give_away(run), tree(run), Dashboard(Run.open(run))
    shown.update_status()
    for name in ACTION_NAMES:
        shown.start_action(name)
    deadline, report = time.monotonic() + 10, {}
    while not report or not all(each["done_at"] for each in report.values()):
        assert time.monotonic() < deadline
        report = shown.run_view.actions.report(shown.status)
        time.sleep(0.02)
    notes = [each["note"] for each in report.values()]
    assert len(notes) == 4 and all(note.startswith("refused") for note in notes), notes
    assert all(owner in note for note in notes), notes
    assert sleep.poll() is None and tree(run) == before


# A run of root, read by a user without privileges -------------------------------------------------


LOOK = "status RUN", "status RUN --json", "runs RUN --json", "status RUN --why", "logs RUN"
ACT = "stop RUN", "stop RUN --now", "checkpoint RUN", "resume RUN", "export RUN"
FOLLOW = "export RUN --format tensorboard --follow"


def test_unprivileged_user_only_reads_a_run_of_root(sleep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run belongs to root, and all users have write permission."""
    if os.geteuid():
        pytest.skip("root alone can be another user")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        home, run = Path(place, "home"), Path(place, "shared", "run")
        home.mkdir()
        os.chown(home, hostile.STRANGER, hostile.STRANGER)
        finished_run(run)
        running(run, process=hostile.process_of(sleep.pid))
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, str(home))

        def said(*rows: str) -> list[hostile.Said]:
            return [hostile.kit(*row.replace("RUN", str(run)).split()) for row in rows]

        # This call imports all modules as root, because the other user cannot read root's Python.
        said(*LOOK)
        open_to_all(run)
        before = tree(run)
        told = hostile.in_a_child(lambda: (said(*LOOK), said(*ACT, FOLLOW)), user=hostile.STRANGER)
        looked, acted = told
        assert [each.code for each in looked] == [0] * len(LOOK), looked
        for each in acted:
            assert each.code == 1 and "root" in each.text and "Traceback" not in each.text
        assert tree(run) == before and sleep.poll() is None


# A run of this user that another user may have changed --------------------------------------------


def test_stop_now_ends_only_processes_of_this_run(run: Path, calls: Calls) -> None:
    """state.json may name any process of the viewer, even a process of another run. Only processes
    of this run may be ended.
    """
    code = [sys.executable, "-c", "import time; time.sleep(600)"]
    others = [subprocess.Popen(["sleep", "600"]), subprocess.Popen([*code, f"{run}2"])]
    own = subprocess.Popen([*code, str(run)])
    try:
        for process in others:
            time.sleep(0.2)
            running(run, process=hostile.process_of(process.pid))
            said = hostile.kit("stop", run, "--now")
            assert said.code == 1 and "Traceback" not in said.text and process.poll() is None, said
            with pytest.raises(JobError):
                Job.attach(run).requeue()
            assert process.poll() is None
        running(run, process=hostile.process_of(own.pid))
        assert hostile.kit("stop", run, "--now").code == 0 and own.wait(60) == -15
    finally:
        for process in (*others, own):
            process.kill()
            process.wait()


def test_stop_now_cancels_only_the_job_of_this_run(run: Path, calls: Calls, tmp_path: Path) -> None:
    for place, code in ((tmp_path / "elsewhere", 1), (Path(f"{run}2"), 1), (run, 0)):
        poll.POLLER.forget(job := SchedulerJob(scheduler="slurm", id="777"))
        calls.place.write_text(str(place))
        running(run, scheduler_job=job)
        said = hostile.kit("stop", run, "--now")
        assert said.code == code and "Traceback" not in said.text, said
        cancelled = [call for call in calls.taken() if call.startswith("scancel")]
        assert cancelled == ["scancel [] 777"] * (code == 0)


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["a link", "another name"])
def test_nothing_is_appended_to_a_linked_file(run, tmp_path, calls, link) -> None:
    opened, mine = Run.open(run), tmp_path / "mine"
    appends: dict[str, Callable[[], Any]] = {
        "alerts.jsonl": lambda: recorded_alerts(opened),
        "history.jsonl": lambda: update_state(run, attempt=1, state=JobState.FAILED),
        ".state.lock": lambda: update_state(run, attempt=1, step=41),
        "metrics.jsonl": lambda: MetricsWriter(run / "metrics.jsonl").write([{"step": 41}]),
        "logs/attempt_02/rank_00000.log": lambda: submission.submit(
            opened.job.spec, Site.load("laptop")
        ).wait(20),
        "logs/attempt_02_supervisor.log": lambda: submission.submit(
            opened.job.spec, Site.load("laptop")
        ).wait(20),
    }
    for name, append in appends.items():
        shutil.copytree(run, tmp_path / "before", symlinks=True)
        mine.write_text("export MINE=1\n")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        link(mine, run / name)
        with contextlib.suppress(OSError, JobError, RunError):
            append()
        assert mine.read_text() == "export MINE=1\n", name
        shutil.rmtree(run)
        (tmp_path / "before").rename(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="permissions do not bind only one user")
@pytest.mark.parametrize(
    ("folder", "counted"), [("checkpoints/step_00000040", [20]), ("checkpoints", [])]
)
def test_status_names_folder_that_may_not_be_entered(
    run: Path, folder: str, counted: list[int]
) -> None:
    for parent in (run, *list(run.parents)[:-1]):
        parent.chmod(parent.stat().st_mode | 0o055)
    (run / folder).chmod(0)

    def look() -> list[Any]:
        shown = Dashboard(Run.open(run)).read_all().facts()
        said = [hostile.kit("status", run), hostile.kit("status", run, "--json")]
        return [*said, shown["checkpoints"], shown["unreadable_note"]]

    text, as_json, steps, note = hostile.in_a_child(look, hostile.STRANGER)
    (run / folder).chmod(0o755)
    assert (text.code, as_json.code, steps) == (0, 0, counted), text.text
    assert f"you may not enter {folder}" in note
    assert f"you may not enter {folder}" in text.text
    assert json.loads(as_json.text)["unreadable"] == [folder]
