"""Rehearsals of the papers' largest jobs, and of jobs that do not fit into the machine's limits."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.scheduler import Broadcast
from cluster.site import Fact, Site
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.estimate import Panel, rehearsal
from kit.estimate.rehearsal import RehearsalReport, rehearse, split_model
from kit.papers.recipes import names, published_recipe

RECIPE = Recipe(data="/nowhere", num_steps=100_000, checkpoint_every=100)


@pytest.fixture(scope="module", autouse=True)
def split_once() -> Iterator[None]:
    """Caches the split of a model for each plan in all tests, because it depends on neither site
    nor recipe.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "split_model", functools.cache(split_model))
        yield


def packed_site(name: str) -> Site:
    """Returns the site `name` with a packed archive of the Python environment on its shared
    disk.
    """
    site = Site.load(name)
    assert site.slurm
    broadcast = Broadcast(directory="/local_storage/environment", archive="/fsx/environment.tar")
    return site.replace(slurm=site.slurm.replace(broadcast=broadcast))


@pytest.fixture
def packed() -> Site:
    return packed_site("frontier")


def of(name: str, **changes) -> tuple[ModelSpec, Plan]:
    published = published_recipe(name)
    return ModelSpec.preset(published.model), published.plan.replace(**changes)


def count(found: RehearsalReport, what: str) -> Any:
    return next(count for count in found.requirements if count.what.startswith(what))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_rehearsal_and_panel_estimates_agree(name):
    recipe = published_recipe(name)
    spec, plan = of(name)
    found = rehearse(spec, plan, RECIPE, Site.load(recipe.site))
    shown = Panel(recipe.model, recipe.site, plan).estimate()
    assert count(found, "time of a step").value == pytest.approx(shown.step_s[0], rel=1e-9)
    used_gib = shown.used_bytes[0] / 2**30
    memory = count(found, "memory of the fullest device")
    assert memory.value == pytest.approx(used_gib, rel=1e-9)
    assert memory.fits, "the paper has trained it"


def test_fp32_rehearsal_is_slower_and_larger():
    """An MI250X GCD has a peak in fp32 that is a quarter of its peak in bf16 (AMD's data sheet)."""
    spec, plan = of("frontier-22b", engine="native", precision="bf16")
    site = Site.load("frontier")
    wide, narrow = (
        rehearse(spec, plan.replace(precision=precision), RECIPE, site)
        for precision in ("fp32", "bf16")
    )
    assert count(wide, "time of a step").value > 1.8 * count(narrow, "time of a step").value
    memory = "memory of the fullest device"
    assert count(wide, memory).value > count(narrow, memory).value


def test_1t_on_3072_devices_fits(packed):
    spec, plan = of("frontier-1t", data_parallel=6, global_batch_size=3072)
    found = rehearse(spec, plan, RECIPE, packed)
    assert plan.num_devices == 3072 and found.fits, found.title
    assert count(found, "nodes").value == 384
    assert count(found, "weights that sharding loses or doubles").value == 0
    assert count(found, "size of the kept checkpoints").value == pytest.approx(3 * 12.1, rel=0.01)
    assert 0.7 < count(found, "productive time").value < 1
    assert "3,072 devices" in found.untested_conditions[0]


def test_70b_on_8192_cores_fits():
    spec, plan = of("hlat-70b")
    plan = plan.replace(data_parallel=8192 // (plan.tensor_parallel * plan.pipeline_parallel))
    plan = plan.replace(global_batch_size=1024)
    found = rehearse(spec, plan, RECIPE, packed_site("trn1.32xlarge"))
    assert plan.num_devices == 8192 and found.fits, found.title
    assert "not known" in {row[3] for row in found.rows}, "what FSx gives depends on the order"
    cost = found.rows[-1]
    assert cost[0] == "failures" and cost[2] == "not known"
    assert "give site.storage.read_bytes_per_s" in cost[-1], "rates not stated are not zeros"
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["counts"][-1]["value"] is None


def test_rehearsal_names_what_does_not_fit(packed):
    spec, plan = of("frontier-1t", data_parallel=6, global_batch_size=3072)
    tight = packed.storage.replace(quota_bytes=Fact(value=30e12, source="a smaller project"))
    found = rehearse(spec, plan, RECIPE, packed.replace(storage=tight))
    assert not found.fits and "does not fit: size of the kept checkpoints;" in found.title
    unpacked = rehearse(spec, plan, RECIPE, Site.load("frontier"))
    assert "nodes that read Python from the shared disk" in unpacked.title
    every = RECIPE.replace(checkpoint_every=1)
    often = rehearse(spec, plan, every, packed, hours_between_failures=0.1)
    assert count(often, "productive time, with a failure every 0.1 h").value < 0.7


def test_rehearsal_counts_kept_checkpoints(packed):
    """The test counts the terabytes of all kept checkpoints. A job in a container is accepted
    without a packed Python environment.
    """
    spec, plan = of("frontier-1t", data_parallel=6, global_batch_size=3072)
    once = rehearse(spec, plan, RECIPE.replace(checkpoint_every=None), packed)
    assert count(once, "size of the kept checkpoints").value == pytest.approx(12.1, rel=0.01), (
        "only the last step is saved"
    )
    rare = rehearse(spec, plan, RECIPE.replace(checkpoint_every=300, keep_every=1000), packed)
    both = (3 + 33) * 12.1
    assert count(rare, "size of the kept checkpoints").value == pytest.approx(both, rel=0.01), (
        "saved and kept"
    )
    site = Site.load("frontier")
    assert site.slurm
    contained = site.replace(slurm=site.slurm.replace(srun_options=("--container=/images/torch",)))
    assert rehearse(spec, plan, RECIPE, contained).fits, "`kit launch` refuses no container"


def test_small_rehearsal_prints_no_exponent():
    """The checkpoints of the demo have 13 MB, and 16 devices fail every 3,168 hours."""
    plan = Plan(data_parallel=16, global_batch_size=16, zero_stage=1, precision="bf16")
    found = rehearse(ModelSpec.preset("demo"), plan, RECIPE, Site.load("dgx-h100"))
    text = "\n".join(" ".join(row) for row in found.rows)
    assert not re.search(r"\de[+-]\d", text), text
    assert count(found, "size of the kept checkpoints").unit == "MB"


def test_rehearsal_refuses_invalid_plan(packed):
    spec, plan = of("frontier-1t")
    with pytest.raises(ConfigError, match="tensor_parallel"):
        rehearse(spec, plan.replace(tensor_parallel=7), RECIPE, packed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [6, 4, 1])
def test_model_split_loses_no_weight(layers, tied):
    spec = ModelSpec.preset("demo").replace(num_layers=layers, tied_embeddings=tied)
    degrees: dict[str, Any] = {"pipeline_parallel": 3, "tensor_parallel": 2, "data_parallel": 3}
    views, num_params = split_model(spec, Plan(**degrees, zero_stage=1, global_batch_size=6))
    assert num_params == spec.num_params
    assert len(views) == 12


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_rehearse_command_fails_if_job_does_not_fit():
    def kit(*words: str) -> Any:
        return CliRunner().invoke(app, ["plan", *words, "--rehearse"])

    steps = ("--set", "recipe.num_steps=1000")
    done = kit("frontier-1t", "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 1 and not said["fits"] and said["model"] == "gpt-1t"
    told = {found["stage"] for found in said["counts"]}
    assert told >= {"plan", "ranks", "start", "checkpoint", "failures"}
    sizes = ("--site", "frontier", "--devices", "8", "--batch", "8")
    assert json.loads(kit("demo", *sizes, "--json").stdout)["model"] == "demo"
    for message, *words in (
        ("--devices: missing", "gpt-1t", "--site", "frontier"),
        ("--devices: frontier-1t has a layout of its own", "frontier-1t", *steps, *sizes),
    ):
        assert message in str(kit(*words).exception)
