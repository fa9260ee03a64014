"""Check of the NxD installation: it distinguishes missing, placeholder, wrong, broken and working
packages.
"""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from kit import doctor
from kit.config.plan import Plan
from kit.engines.configuration import configuration_files
from kit.engines.neuron.probe import SUPPORTED, NeuronError, probe, require_nxd
from tests.engines.conftest import VERSIONS, install
from tests.support.attempts import Attempt
from tests.support.workers import local_run

ROOT = Path(__file__).parents[2]
NEURON = Plan(engine="neuron", precision="bf16")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Returns a function that installs distributions and modules (name: source text) for this
    process.
    """

    def install_them(versions: dict[str, str], modules: dict[str, str]) -> None:
        install(tmp_path / "site", versions)
        for name, source in modules.items():
            (tmp_path / "site" / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return install_them


@pytest.mark.skipif(probe().state != "absent", reason="NxD is installed")
def test_probe_reports_missing_nxd():
    status = probe()
    assert status.versions == {}
    for said in ("it is not installed", "requirements/trainium.txt", "plan.engine 'native'"):
        assert said in status.message
    with pytest.raises(NeuronError, match="it is not installed"):
        require_nxd()


SOURCES = {"neuronx_distributed": "", "torch_neuronx": "", "torch_xla": ""}
UNFIT = 'raise ImportError("_XLAC.so: undefined symbol: deleteNode")'
LACKING = 'import sys; sys.modules["torch.utils.checkpoint"] = None'
OTHER_INDEX = 'raise ImportError("WRONG PACKAGE. Install it from the other index.")'
WRONG = "needs neuronx-distributed 0.17 or 0.18: version {} is installed"
FOUND = {
    "placeholder by its version": (
        {"neuronx-distributed": "0.1"},
        {},
        ("placeholder", "0.1 is the public index's placeholder"),
    ),
    "placeholder by what it says when imported": (
        VERSIONS,
        {**SOURCES, "torch_neuronx": OTHER_INDEX},
        ("placeholder", "the public index's placeholder"),
    ),
    **{
        f"version {version}": (
            {**VERSIONS, "neuronx-distributed": version},
            SOURCES,
            ("wrong version", WRONG.format(version)),
        )
        for version in ("0.9.0", "0.15.22404", "0.19.28492")
    },
    "native backend of the same name": (
        {name: version for name, version in VERSIONS.items() if name != "torch-xla"},
        SOURCES,
        ("wrong version", "native PyTorch backend"),
    ),
    "what does not fit torch tells its last line": (
        VERSIONS,
        {**SOURCES, "torch_xla": UNFIT},
        ("broken", "cannot be imported: ImportError: _XLAC.so: undefined symbol: deleteNode."),
    ),
    "an engine that this torch does not hold": (
        VERSIONS,
        {**SOURCES, "torch_xla": LACKING},
        ("broken", "the kit's engine cannot be imported: ModuleNotFoundError: import of torch.uti"),
    ),
    "source on the path is no installation": (
        {},
        {"neuronx_distributed": ""},
        ("broken", "never installed"),
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_probe_reports_why_nxd_is_unusable(installed, found):
    versions, modules, (state, said) = FOUND[found]
    installed(versions, modules)
    status = probe()
    assert status.state == state and said in status.message
    if state == "broken" and versions:
        assert doctor._neuron().ok is False


def test_rank_reports_broken_nxd_without_traceback(installed, spec, recipe, tmp_path):
    """The environment of the ranks may differ from the environment of the notebook that launched
    the job.
    """
    raising = 'raise RuntimeError("operator torch_xla::op does not exist")'
    installed(VERSIONS, {"neuronx_distributed": "", "torch_neuronx": "", "torch_xla": raising})
    run = local_run(tmp_path / "run", spec, NEURON, recipe)
    attempt = Attempt(run)
    assert attempt.wait() == [os.EX_CONFIG], attempt.log()
    assert "RuntimeError: operator torch_xla::op does not exist" in attempt.log()
    assert "Traceback" not in attempt.log()


def test_doctor_reports_placeholder_nxd(installed, monkeypatch):
    assert doctor._neuron().ok is None or probe().state == "ok"
    installed({"neuronx-distributed": "0.1"}, {})
    row = doctor._neuron()
    assert row.ok is False and row.found.startswith("placeholder: neuronx-distributed 0.1")
    assert "requirements/trainium.txt" in row.advice


def test_doctor_reports_missing_neuron_device(standin, monkeypatch):
    """If the packages work but no Neuron device exists, `kit doctor` reports neither success nor
    failure.
    """
    monkeypatch.setattr("kit.engines.neuron.probe.has_device", lambda: False)
    row = doctor._neuron()
    assert row.ok is None and row.found.startswith("0.17.26814, imported; no Neuron device")


def test_configuration_files_hold_nxd_arguments(spec, recipe):
    (text,) = configuration_files(spec, NEURON, recipe).values()
    told = {"zero_one_enabled": False, "grad_clipping": False}
    assert json.loads(text)["optimizer_config"] == told


@pytest.mark.parametrize("name", ["trainium.txt", "hlat.txt"])
def test_trainium_requirements_pin_exact_versions(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "--extra-index-url "))]
    assert pins and all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9.]*", pin) for pin in pins), pins
    found = dict(pin.split("==") for pin in pins)
    assert {"neuronx-distributed", "neuronx-cc", "torch-neuronx"} <= set(found)
    if name == "trainium.txt":
        assert found["neuronx-distributed"].rpartition(".")[0] in SUPPORTED
    ours = (ROOT / "pyproject.toml").read_text()
    assert "neuronx-distributed" not in ours, "its name on the public index misleads"


NOTEBOOKS = {"anywidget", "matplotlib", "jupyterlab", "ipykernel", "ipywidgets", "nbclient"}
OF_NEURON = {"torch", "numpy"}
"""Packages that AWS's packages require in fixed versions, which differ from the kit's versions."""


@pytest.mark.parametrize(
    "file", ["requirements/trainium.txt", "tests/engines/real_nxd/requirements.txt"]
)
def test_trainium_requirements_hold_kit_dependencies(file):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {line.partition(">=")[0] for line in ours} - NOTEBOOKS - OF_NEURON
    found = {line.partition("==")[0] for line in (ROOT / file).read_text().splitlines()}
    assert len(needed) >= 4 and needed <= found, needed - found
