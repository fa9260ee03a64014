"""File modes: files and folders that commands write have the mode that the umask allows."""

import os
from pathlib import Path

import pytest

import kit
from cluster.login.mirror import Mirror
from cluster.state import JobState
from kit.cli.app import app
from kit.config.spec import ModelSpec

LOG = (
    " iteration {n:8d}/ 100 | consumed samples: {n:8d} | elapsed time per iteration (ms): 900.0 |"
    " learning rate: 1.0E-04 | global batch size: 4 | lm loss: 2.5E+00 | grad norm: 1.0 |\n"
)


def kit_command(words: str) -> None:
    app(words.split(), standalone_mode=False)


@pytest.mark.parametrize("umask", [0o077, 0o002], ids=oct)
def test_every_file_follows_umask(umask, tmp_path, tiny_dataset, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    text = next(tiny_dataset.directory.parent.glob("*.jsonl"))
    kept = os.umask(umask)
    try:
        (tmp_path / "files").mkdir()
        monkeypatch.chdir(tmp_path / "files")
        shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_hidden_size": 32}
        spec = ModelSpec.llama(name="tiny", vocab_size=512, sequence_length=32, **shape)
        spec.write(Path("tiny.json"))
        Path("log.txt").write_text("".join(LOG.format(n=n) for n in range(1, 9)))
        Mirror(login="there", python="python", source="/", directory="/run").own().write(
            Path("login.json")
        )
        kit_command(f"data build data --source {text} --vocab-size 300")
        kit_command("plan tiny.json --site frontier --devices 8 --batch 16 --out layout.json")
        recipe = kit.Recipe(data="data", num_steps=2, learning_rate=1e-3, checkpoint_every=1)
        job = kit.launch("run", spec=spec, plan=kit.Plan(global_batch_size=2), recipe=recipe).job
        assert job.wait().state is JobState.DONE, job.logs()
        kit_command("export run --format hf --out folder")
        kit_command("export run")
        kit_command("figure run")
        kit_command("eval run --tasks heldout --limit 2")
        degrees = [f"--set plan.{kind}_parallel=1" for kind in ("tensor", "pipeline", "data")]
        given = f"--site frontier --model tiny.json {' '.join(degrees)}"
        kit_command(f"import log.txt --out imported {given}")
        kit_command("runs .")
    finally:
        os.umask(kept)
    files = [file for file in tmp_path.rglob("*") if not file.is_socket()]
    found = {file: file.stat().st_mode & 0o777 for file in files}
    assert len(found) > 50
    asked = {file: (0o777 if file.is_dir() else 0o666) & ~umask for file in files}
    # Lock files have mode 0600. Another user who could open a lock file could hold its lock and
    # block the run.
    asked |= {file: 0o600 for file in files if file.name.endswith(".lock")}
    assert not {str(file): f"{mode:o}" for file, mode in found.items() if mode != asked[file]}
    assert tmp_path / "config" / "kit" / "mirrors" in found
