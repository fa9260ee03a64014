"""README.md: the printed plan is up to date, and all commands succeed in their order for a user who
has no files yet.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.choose.nearest import measured_mfu
from kit.estimate.fit import published
from kit.estimate.fit.calibrate import calibrate, published_calibration
from kit.estimate.theory.layouts import Layouts
from kit.papers.recipes import published_recipe
from tests.bench.headlines import plan_example

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
COMMANDS = re.findall(r"^\| [^|`]+ \| `(kit [^`]+)` \|", TEXT, re.M)
SAID = re.compile(
    r"^```python\n(.*?)^```|^\$ (kit (?:[^\n]*\\\n)*[^\n]+)$|`(kit (?:-|\w+ )[^`\n]+)`",
    re.M | re.S,
)
"""Matches the text that a user may type: Python code, a command line after `$`, or a command within
a sentence. A command may continue over several lines. The name of a command alone, such as
`kit plan`, does not match."""
ON_A_CLUSTER = ("mine.toml", "runs/web")
"""Words in commands that need Slurm. These commands are tested in `tests/cluster`."""


def test_readme_plan_equals_the_commands_output():
    assert plan_example(README) in TEXT, "refresh it: `python -m tests.bench.headlines`"


def test_readme_plan_is_not_faster_than_published_runs() -> None:
    """The MFU of the first plan is at most the highest published MFU on its device."""
    command = re.search(r"^\$ (kit plan (?:.*\\\n)*.*)$", TEXT, re.M)
    assert command
    words = shlex.split(command[1].replace("\\\n", " "))
    site = Site.load(words[words.index("--site") + 1])
    mfu = re.search(r"MFU ([\d.]+)%", TEXT[command.end() :])
    highest = measured_mfu(site.device.name, "bf16")
    assert mfu and highest and float(mfu[1]) / 100 <= highest


def test_readme_sentence_below_the_plan_is_current() -> None:
    """The sentence has the predicted step time of the plan, the highest published MFU on H100, and
    the step time of one published run, measured and predicted by a fit without this run.
    """
    sentence = re.search(r"^Predicted: ([\d.]+) s.*?\n\n", TEXT, re.M | re.S)
    step = re.search(r"^step +([\d.]+) s", TEXT, re.M)
    assert sentence and step
    assert float(sentence[1]) == pytest.approx(float(step[1]), abs=0.005)
    runs = published.of_site("dgx-h100")
    assert f"contains {len(runs)} published" in sentence[0]
    wide = [run for run in runs if run.precision == "bf16"]
    fastest = max(wide, key=lambda run: run.flops_per_s() or 0.0)
    highest = measured_mfu("NVIDIA H100-SXM5-80GB", "bf16")
    assert f"{highest:.1%}".replace("%", " %") in sentence[0]
    assert f"({fastest.spec.name} on {fastest.num_devices} H100" in sentence[0].replace("\n", " ")
    (olmo,) = (run for run in runs if run.spec.name == "Llama-3-8B")
    others = calibrate([run for run in runs if run is not olmo], Site.load("dgx-h100"))
    without_s = others.predict(olmo.layouts()).total_s.item()
    text = sentence[0].replace("\n", " ")
    last = re.search(r"measured step time is ([\d.]+) s, .* predicts ([\d.]+) s\.", text)
    assert last
    measured, predicted = last.groups()
    assert float(measured) == pytest.approx(olmo.step_time_s, abs=0.05)
    assert float(predicted) == pytest.approx(without_s, abs=0.05)


def test_readme_sentence_about_hlat_is_current():
    """The sentence has the measured times that were published, and a prediction by a planner model
    fitted without these runs.
    """
    sentence = re.search(r"^For HLAT-70B on .*?\n\n", TEXT, re.M | re.S)
    assert sentence
    told = [float(number) for number in re.findall(r"([\d.]+) s\b", sentence[0])]
    site, recipe = Site.load("trn1.32xlarge"), published_recipe("hlat-70b")
    runs = published.of_site(site.name)
    spec, plan = ModelSpec.preset(recipe.model), recipe.plan
    same = [run for run in runs if _shape(run.spec, run.plan) == _shape(spec, plan)]
    assert len(runs) == 11 and len(same) == 2
    layouts = Layouts.of(spec, [plan])
    whole = published_calibration(site).predict(layouts)
    without = calibrate([run for run in runs if run not in same], site).predict(layouts)
    expected = [
        whole.total_s.item(),
        *(run.step_time_s for run in same),
        without.total_s.item(),
        without.high_s.item(),
    ]
    assert told == pytest.approx(expected, abs=0.05)
    assert f"({without.low_s.item():.1f} to " in sentence[0]


def _shape(spec: ModelSpec, plan: Plan) -> tuple[int, int, int, int]:
    degrees = plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel
    return spec.num_params, *degrees


# The commands take 1.5 minutes on an idle machine, and several times as long on a busy one.
@pytest.mark.timeout(1800)
def test_readme_commands_run_in_order_in_empty_home(tmp_path):
    (tmp_path / "home").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "XDG_", "KIT_"))
    }
    environment |= {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    launched = [command.split()[2] for command in COMMANDS if command.startswith("kit launch ")]
    assert len(launched) == 1, "each launch has a directory of its own"
    ran = []
    for python, *commands in SAID.findall(TEXT):
        command = "".join(commands).replace("\\\n", " ")
        command = command.replace("NAME", "frontier-strong-scaling")
        if any(word in command for word in ON_A_CLUSTER):
            continue
        words = ["-c", python] if python else ["-m", *shlex.split(command)]
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command or python}\n{done.stdout}\n{done.stderr}"
        assert "loss" in done.stdout or not python
        print(command or python, done.stdout, sep="\n")
        ran.append(command)
    assert {*COMMANDS, "", "kit --help"} < {*ran}, "and the Python between them"
    assert list(tmp_path.glob("*.png")), "the figure"
