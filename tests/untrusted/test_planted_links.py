"""Links that another user has planted at a path to which a command writes. The target of such a
link is never changed.
"""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from cluster.attempts import claim_attempt, claimed
from cluster.state import JobError, write_request
from kit.evaluate.harness import write_samples
from kit.papers import FIGURES
from kit.show.style import new_figure, save_figure
from kit.train import use_own_compile_cache
from tests.support import hostile
from tests.support.hostile import finished_run

PRECIOUS = b"three years of work"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one finished run of the user who runs the tests."""
    finished_run(tmp_path / "runs" / "one")
    return tmp_path / "runs"


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[Path], Path]:
    """Returns a function that makes a path a link to a file of this user, and returns the path of
    that file.
    """

    def link(name: Path) -> Path:
        target = tmp_path / f"thesis-{name.name}"
        target.write_bytes(PRECIOUS)
        name.symlink_to(target)
        return target

    return link


OUTPUTS = {
    "runs FOLDER --compare one": "compare.png",
    "figure FOLDER/one": "one/figure.png",
    "figure FOLDER/one --out FOLDER/loss.SVG": "loss.SVG",
    "figure FOLDER/one --out FOLDER/loss.pdf": "loss.pdf",
    f"figure {next(iter(FIGURES))} --out FOLDER/paper.png": "paper.csv",
    "export FOLDER/one --format csv --overwrite": "one/export.csv",
}
"""Commands that write a file, with the path of the file in FOLDER."""


@pytest.mark.parametrize("words", OUTPUTS)
def test_output_replaces_planted_link(words: str, runs: Path, plant: Callable) -> None:
    file = runs / OUTPUTS[words]
    target = plant(file)
    said = hostile.kit(*words.replace("FOLDER", str(runs)).split())
    assert said.code == 0, said.text
    assert target.read_bytes() == PRECIOUS
    assert not file.is_symlink() and file.stat().st_size > 100
    assert not list(file.parent.glob(f".{file.name}.*")), "a temporary file is left"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_compare_refuses_folder_of_another_user(runs: Path, tmp_path: Path) -> None:
    os.chown(runs, hostile.STRANGER, hostile.STRANGER)
    said = hostile.kit("runs", runs, "--compare", "one")
    assert said.code == 1 and "--out" in said.text
    assert not (runs / "compare.png").exists()
    out = tmp_path / "mine.png"
    assert hostile.kit("runs", runs, "--compare", "one", "--out", out).code == 0
    assert out.stat().st_size > 1000


def test_csv_cells_are_no_formulas(tmp_path: Path) -> None:
    rows = [{"run": '=HYPERLINK("http://evil")', "loss": -1.5}, {"run": "@SUM(1)", "loss": -2}]
    with new_figure(height=2) as (figure, _):
        save_figure(figure, rows, [tmp_path / "table.csv"])
    with (tmp_path / "table.csv").open() as stream:
        cells = [cell for row in csv.reader(stream) for cell in row]
    assert cells == ["run", "loss", '\'=HYPERLINK("http://evil")', "-1.5", "'@SUM(1)", "-2"]


LINKED = ("control", "ranks", "checkpoints", "logs", "eval", "tensorboard", "wandb")
INNER = ("logs/attempt_02", "checkpoints/step_00000060", "eval/step_00000040.samples")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
@pytest.mark.parametrize("name", [*LINKED, *INNER])
def test_linked_folder_of_another_user_is_refused(name: str, runs: Path, tmp_path: Path) -> None:
    run, folder, target = runs / "one", runs / "one" / name, tmp_path / "precious"
    if folder.exists():
        folder.rename(target)
    target.mkdir(exist_ok=True)
    (target / "request_checkpoint").write_text("mine")
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(target)
    os.chown(folder, hostile.STRANGER, hostile.STRANGER, follow_symlinks=False)
    before = hostile.tree(target)
    for write in (lambda: write_request(run, "stop"), lambda: claim_attempt(run)):
        with pytest.raises(JobError, match=f"{name}: it is a link that nobody made"):
            write()
    with pytest.raises(JobError), claimed(run, {"job.json": "{}"}):
        pass
    assert hostile.tree(target) == before
    os.chown(folder, 0, 0, follow_symlinks=False)
    write_request(run, "stop")
    assert claim_attempt(run) > 1, "the owner's links are followed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_sink_refuses_linked_folder(to: str, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    for link in (runs / "one" / to, runs / "one" / to / "attempt_01"):
        link.symlink_to(tmp_path / "precious")
        os.chown(link, hostile.STRANGER, hostile.STRANGER, follow_symlinks=False)
        said = hostile.kit("export", runs / "one", "--format", to)
        assert said.code == 1 and "it is a link that nobody made" in " ".join(said.text.split())
        link.unlink()
        (runs / "one" / to).mkdir(exist_ok=True)
    assert not [*(tmp_path / "precious").iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_eval_samples_refuse_linked_folder(tmp_path: Path) -> None:
    """Evaluation samples are written beside the model's folder, into a folder that may belong to
    another user.
    """
    (tmp_path / "precious").mkdir()
    link = tmp_path / "model.eval.samples"
    link.symlink_to(tmp_path / "precious")
    os.chown(link, hostile.STRANGER, hostile.STRANGER, follow_symlinks=False)
    with pytest.raises(JobError, match="it is a link that nobody made"):
        write_samples(link, {"task": [{}]})
    assert not [*(tmp_path / "precious").iterdir()]


@pytest.mark.parametrize("name", ["submit.sh", "job.json", "control/request_stop", "exit.json"])
def test_failed_launch_copies_no_linked_file(name: str, runs: Path, plant: Callable) -> None:
    """After a failed launch, the earlier files of the run are restored. A planted link must not
    make the kit copy the content of a private file into the run.
    """
    run = runs / "one"
    (run / name).unlink(missing_ok=True)
    (run / "control").mkdir(exist_ok=True)
    target = plant(run / name)
    with pytest.raises(RuntimeError), claimed(run, {"job.json": "{}", "submit.sh": "true"}):
        raise RuntimeError
    assert target.read_bytes() == PRECIOUS
    copies = [file for file in run.rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [file for file in copies if file.read_bytes() == PRECIOUS]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["wandb/settings", ".wandb/settings"])
def test_wandb_settings_of_another_user_are_refused(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb's settings file may name another server, to which the user's key would be sent."""
    file = tmp_path / "shared" / name
    file.parent.mkdir(parents=True)
    file.write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    os.chown(file, hostile.STRANGER, hostile.STRANGER)
    monkeypatch.chdir(tmp_path / "shared")
    said = hostile.kit("export", runs / "one", "--format", "wandb")
    assert said.code == 1 and "belongs to nobody" in " ".join(said.text.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_compile_cache_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, torch.compile runs code from /tmp/torchinductor_USER, no matter who created this
    folder.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "viewer")

    def chosen() -> Path:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        use_own_compile_cache()
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    default = Path(default_cache_dir())
    assert default.parent == tmp_path
    assert chosen() == default and default.stat().st_mode & 0o777 == 0o700
    default.chmod(0o777)
    assert chosen() != default
    default.chmod(0o755)
    os.chown(default, hostile.STRANGER, hostile.STRANGER)
    other = chosen()
    assert other != default and other.stat().st_uid == os.geteuid()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(default)
    use_own_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(default), "the user's own choice"
