"""Set-up of all tests. Each process uses one thread, because several processes share the cores."""

import gc
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from cluster.record import Record
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from tests.support import quick


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--real-limits", action="store_true", help="limits as long as in use (make faults)")
    add("--thorough", action="store_true", help="also what cheaper tests hold too (make faults)")
    add("--kills", type=int, default=2, help="of a training run (make faults: 100)")
    add("--quick", action="store_true", help="only what takes little time (make quick)")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # The import of the test modules leaves no garbage to collect.
    if config.getoption("--quick"):
        config.pluginmanager.register(quick.Quick())


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # At exit, Python would otherwise search all objects of torch for reference cycles.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_thorough, is_quick = map(config.getoption, ("--thorough", "--quick"))
    left_out = {
        item
        for item in items
        if (item.get_closest_marker("thorough") and not is_thorough)
        or (is_quick and quick.leaves_out(item))
    }
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


@pytest.fixture(autouse=True)
def environment(tmp_path_factory):
    """Removes the environment variables that torch.distributed reads, such as RANK, which DeepSpeed
    sets. Restores the complete environment after each test.
    """
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: value for name, value in os.environ.items() if name not in ranks}
    for name in ranks:
        os.environ.pop(name, None)
    # The settings of the user who runs the tests, such as on_alert, are not read.
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.getbasetemp())
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def mount_memory(tmp_path):
    """Returns a function that mounts a tmpfs with the given mount options on a new folder. The
    function returns the folder.
    """
    folders = []

    def mounted(options: str) -> Path:
        folder = tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
        folders.append(folder)
        return folder

    yield mounted
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def reader_python(tmp_path_factory: pytest.TempPathFactory):
    """Returns a function that makes a user's environment with the kit's wheel and the packages of
    some extras. The function returns the path of the environment's Python.
    """
    from tests.support.environments import build_wheel, closure, make_environment

    made: dict[tuple[str, ...], Path] = {}
    wheels: list[Path] = []

    def get(*extras: str) -> Path:
        if extras not in made:
            wheels or wheels.append(build_wheel(tmp_path_factory.mktemp("wheel")))
            folder = tmp_path_factory.mktemp("reader")
            made[extras] = make_environment(folder, wheels[0], closure(*extras))
        return made[extras]

    return get


TINY = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 128}
TINY |= {"sequence_length": 16}


@pytest.fixture(scope="session")
def llama_spec() -> ModelSpec:
    """A tiny Llama with grouped key/value heads."""
    return ModelSpec.llama(name="tiny-llama", **TINY, num_kv_heads=2, ffn_hidden_size=64)


@pytest.fixture(scope="session")
def gpt_spec() -> ModelSpec:
    """A tiny GPT with tied embeddings."""
    return ModelSpec.gpt(name="tiny-gpt", **TINY)


@pytest.fixture(scope="session")
def one_process():
    """Returns a function that runs a worker function with a model and a plan in one process, and
    returns the worker's result. Equal calls return the cached result.
    """
    from tests.support.workers import run_ranks

    made: dict[tuple, Any] = {}

    def get(function: Callable, spec: ModelSpec, plan: Plan, *arguments: Record) -> Any:
        key = function, *(record.to_json() for record in (spec, plan, *arguments))
        if key not in made:
            made[key] = run_ranks(1, function, spec, plan, *arguments)[0]
        return made[key]

    return get


@pytest.fixture(scope="module")
def run_standing() -> Iterator[Callable[..., list[Any]]]:
    """Returns a function that works like `run_ranks`, but keeps the started ranks alive for all
    tests of a module.
    """
    from tests.support.workers import StandingRanks

    standing: dict[int, StandingRanks] = {}

    def run(num_ranks: int, function: Callable, *args: Any) -> list[Any]:
        quick.refuse_many(num_ranks)
        if num_ranks not in standing:
            standing[num_ranks] = StandingRanks(num_ranks)
        try:
            return standing[num_ranks].run(function, *args)
        except BaseException:
            standing.pop(num_ranks).close()
            raise

    yield run
    for ranks in standing.values():
        ranks.close()


@pytest.fixture(scope="session")
def native_run(one_process):
    """Returns a function that trains a model for a few steps with the native engine on one process.
    The function returns the losses and gradient norms.
    """
    from tests.support.parity import RECIPE, make_plan, train

    return lambda spec, recipe=RECIPE: one_process(train, spec, make_plan({}), recipe)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory):
    """A dataset of a few hundred short documents with a vocabulary of 300."""
    from kit.data import build_dataset

    folder = tmp_path_factory.mktemp("tiny-data")
    words = "the a of to and in is on loss step layer weight token model train data cut over rank"
    words = f"{words} stage".split()
    texts = [
        " ".join(words[(i * 7 + j * j * (i % 5 + 1)) % len(words)] for j in range(60))
        for i in range(400)
    ]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    asked = {"vocab_size": 300, "validation_fraction": 0.1, "progress": False}
    return build_dataset(folder / "data", sources=[folder / "text.jsonl"], **asked)


@pytest.fixture(scope="session")
def spec(llama_spec: ModelSpec) -> ModelSpec:
    """The tiny Llama model with the vocabulary size of the tiny dataset, for runs with real
    training.
    """
    return llama_spec.replace(vocab_size=300)


@pytest.fixture(scope="session")
def unbroken(spec, recipe, tmp_path_factory: pytest.TempPathFactory):
    """A finished run of two processes in which no fault occurred."""
    import kit
    from cluster.state import JobState
    from tests.support.fault_cost import DP2

    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    run = kit.launch(folder, spec=spec, plan=DP2, recipe=recipe)
    status = run.job.wait(timeout_s=180)
    assert status.state is JobState.DONE, f"{status}\n{run.job.logs()}"
    return run


@pytest.fixture(scope="session")
def recipe(tiny_dataset) -> Recipe:
    """Recipe of a run with 120 short steps on the tiny dataset."""
    rates = {"learning_rate": 3e-3, "warmup_steps": 10, "checkpoint_every": 20}
    return Recipe(data=str(tiny_dataset.directory), num_steps=120, **rates)
