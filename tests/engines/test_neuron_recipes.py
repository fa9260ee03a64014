"""HLAT's recipes as plans: the arguments for NxD, the environment of the job, and plans, models and
sites that are refused.
"""

import contextlib
import json
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

import kit
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import check_site
from kit.engines.neuron.configuration import (
    check_neuron_environment,
    check_platform,
    job_environment,
    needed_environment,
    nxd_arguments,
)
from kit.errors import ConfigError
from kit.estimate.choose.search import search
from kit.estimate.rehearsal import rehearse
from kit.launcher import job_spec
from tests.support.workers import local_run

HLAT_7B = Plan(
    engine="neuron",
    precision="bf16",
    tensor_parallel=8,
    data_parallel=256,
    sequence_parallel=True,
    recompute="selective",
    global_batch_size=1024,
)
HLAT_70B = HLAT_7B.replace(tensor_parallel=32, pipeline_parallel=8, data_parallel=32, zero_stage=1)
PLANS = {"hlat-7b": HLAT_7B, "hlat-70b": HLAT_70B}
RECIPE = Recipe(data="none", num_steps=10)


@pytest.mark.parametrize(("name", "has_fp32"), [("hlat-7b", False), ("hlat-70b", True)])
def test_nxd_arguments_set_fp32_weights_with_zero_1(name, has_fp32):
    """HLAT's 7B recipe is pure bf16 without ZeRO. The 70B recipe has ZeRO 1, with fp32 master
    weights and fp32 gradient accumulation.
    """
    spec, plan = ModelSpec.preset(name), PLANS[name]
    plan.check(spec, {"hlat-7b": 64, "hlat-70b": 256}[name] * 32)
    told = nxd_arguments(spec, plan)
    fp32 = "use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"
    assert told["mixed_precision_config"] == dict.fromkeys(fp32, has_fp32)
    assert told["optimizer_config"] == {"zero_one_enabled": has_fp32, "grad_clipping": False}
    degrees = told["tensor_parallel_size"], told["pipeline_parallel_size"]
    assert degrees == (plan.tensor_parallel, plan.pipeline_parallel) and told["sequence_parallel"]
    assert json.loads(json.dumps(told)) == told, "what is shown is what is told"
    assert (told["pipeline_config"] is None) == (plan.pipeline_parallel == 1)


def test_70b_has_even_stages_and_copied_heads():
    spec = ModelSpec.preset("hlat-70b")
    assert HLAT_70B.kv_replication(spec) == 4 and HLAT_70B.num_microbatches == 32
    layout = nxd_arguments(spec, HLAT_70B)["pipeline_config"]
    cuts = [f"model.layers.{last}" for last in (9, 19, 29, 39, 49, 59, 69)]
    assert layout["pipeline_cuts"] == cuts
    assert layout["num_microbatches"] == 32 and layout["use_zero1_optimizer"]
    assert layout["broadcast_and_average_loss"] and not layout["return_loss_on_cpu"]


def a_run(directory: Path, model: str, plan: Plan, site: str) -> kit.Run:
    """Returns a prepared run whose directory holds no files yet."""
    spec = ModelSpec.preset(model)
    return kit.Run(directory, spec=spec, plan=plan, recipe=RECIPE, site=Site.load(site))


@pytest.mark.parametrize("site", ["trn1.32xlarge", "eks-trn1"])
@pytest.mark.parametrize("name", PLANS)
def test_job_environment_sets_the_plans_precision(name, site, tmp_path):
    run = a_run(tmp_path, name, PLANS[name], site)
    job = job_spec(run)
    assert job.num_processes == PLANS[name].num_devices
    assert job.num_nodes == {"hlat-7b": 64, "hlat-70b": 256}[name]
    rounding = {"hlat-7b": "1", "hlat-70b": "0"}[name]
    off = dict.fromkeys(("XLA_USE_BF16", "XLA_DOWNCAST_BF16"), "0")
    expected = run.site.profile(name) | off | {"NEURON_RT_STOCHASTIC_ROUNDING_EN": rounding}
    assert job.environment == expected
    check_neuron_environment(run.plan, job.environment)


def test_local_neuron_ranks_are_started_by_torchrun(tmp_path, llama_spec):
    def job(**changes):
        plan = Plan(engine="neuron", precision="bf16").replace(**changes)
        return job_spec(local_run(tmp_path / plan.engine, llama_spec, plan, RECIPE))

    assert job().argv[1:4] == ("-P", "-m", "kit.train") and job().num_processes == 1
    two = job(tensor_parallel=2)
    assert two.argv[1:4] == ("-P", "-m", "torch.distributed.run") and two.num_processes == 1
    understood = parse_args(list(two.argv[4:]))
    found = understood.nproc_per_node, understood.nnodes, understood.no_python
    assert found == ("2", "1:1", True)
    assert (understood.training_script, *understood.training_script_args) == job().argv
    assert job(engine="native", precision="fp32", tensor_parallel=2).num_processes == 2


def test_job_spec_refuses_site_without_hlat_profile(tmp_path):
    with pytest.raises(ConfigError, match="site.slurm.profiles: 'hlat-7b' is unknown"):
        job_spec(a_run(tmp_path, "hlat-7b", HLAT_7B, "frontier"))


def test_native_engine_sets_no_job_environment(tmp_path, llama_spec):
    run = local_run(tmp_path / "run", llama_spec, Plan(), RECIPE)
    assert job_spec(run).environment == {}


ZERO, FP32, BF16 = {"zero_stage": 1}, {"precision": "fp32"}, {"precision": "bf16"}
ROUNDED = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({}, {}, "needs NEURON_RT_STOCHASTIC_ROUNDING_EN='1', but .*ROUNDING_EN is 'not set'"),
        (ZERO, ROUNDED, "ROUNDING_EN='0', but .* is '1'"),
        (ZERO, {"XLA_DOWNCAST_BF16": "1"}, "XLA_DOWNCAST_BF16 is '1'"),
        (FP32, {"NEURON_CC_FLAGS": "--model-type transformer"}, "--auto-cast=none"),
    ],
)
def test_environment_of_another_precision_is_refused(changes, environment, message):
    """An environment variable that is not set means that the setting is off."""
    plan, flags = HLAT_7B.replace(**changes), environment.get("NEURON_CC_FLAGS", "")
    with pytest.raises(ConfigError, match=message):
        check_neuron_environment(plan, environment)
    mended = environment | needed_environment(plan, flags)
    check_neuron_environment(plan, mended)
    assert all(word in mended.get("NEURON_CC_FLAGS", "") for word in flags.split())
    check_neuron_environment(HLAT_70B, {})
    check_neuron_environment(HLAT_70B.replace(**FP32), {"NEURON_CC_FLAGS": "--auto-cast none -O1"})


def test_neuron_plan_refuses_gpt_and_uneven_heads(gpt_spec, llama_spec):
    """The plan refuses GPT models, and numbers of query heads that cannot be divided among the
    tensor ranks. Only the Neuron engine copies a key/value head to several tensor ranks.
    """
    plan, eight = Plan(engine="neuron", precision="bf16"), llama_spec.replace(num_heads=8)
    plan.check(llama_spec)
    copying = plan.replace(tensor_parallel=8)
    copying.check(eight)
    assert eight.num_kv_heads == 2 and copying.kv_replication(eight) == 4
    for asked, spec, message in (
        (plan, gpt_spec, "'neuron' trains Llamas"),
        (copying.replace(engine="native"), eight, "num_kv_heads: 2 is not divisible by tensor_par"),
        (copying.replace(tensor_parallel=6), eight, "spec.num_heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            asked.check(spec)


@pytest.mark.parametrize(
    ("num_kv_heads", "pipeline", "data", "message"),
    [
        (4, 1, 1, None),
        (4, 1, 8, None),
        (4, 1, 16, None),
        (4, 2, 8, None),
        (2, 1, 8, "plan.tensor_parallel: 4 .* spec.num_kv_heads is 2: .* Use 2, or 8 and more"),
        (1, 1, 8, "plan.tensor_parallel: 4 is not allowed"),
        (4, 2, 1, "plan.data_parallel: 1 is not allowed .* the 2 groups of four ranks on a node"),
        (4, 2, 4, "plan.data_parallel: 4 is not .* Use a multiple of 8, pipeline_parallel 1"),
        (4, 1, 12, "plan.data_parallel: 12 is not allowed"),
    ],
)
def test_tensor_parallel_4_limits_heads_and_replicas(
    num_kv_heads, pipeline, data, message, llama_spec
):
    """With four tensor ranks, NxD pairs the ranks correctly only in some layouts. The plan refuses
    all other layouts.
    """
    spec = llama_spec.replace(num_kv_heads=num_kv_heads)
    degrees = {"tensor_parallel": 4, "pipeline_parallel": pipeline, "data_parallel": data}
    plan = Plan.from_dict({"engine": "neuron", **BF16, **degrees, "global_batch_size": data})
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        plan.check(spec)
    plan.replace(engine="native", tensor_parallel=1).check(spec)


ALONE = "NEURON_EXPERIMENTAL_COMPRESS_RG"


@pytest.mark.parametrize("site", ["trn1.32xlarge", "eks-trn1"])
def test_tensor_parallel_4_disables_compressed_groups(site):
    """With NEURON_EXPERIMENTAL_COMPRESS_RG, NxD passes only its first group, and the other groups
    are assumed to be consecutive ranks. This is wrong for four tensor ranks, which are not
    consecutive.
    """
    plan = HLAT_70B.replace(tensor_parallel=4, pipeline_parallel=1, data_parallel=8)
    environment = job_environment(plan, Site.load(site))
    assert environment[ALONE] == "0"
    message = f"tensor_parallel 4 on engine 'neuron' needs {ALONE}"
    with pytest.raises(ConfigError, match=message):
        check_neuron_environment(plan, environment | {ALONE: "1"})
    assert job_environment(HLAT_70B, Site.load(site))[ALONE] == "1"


@pytest.mark.parametrize(
    ("platform", "allowed"), [("trn1", 4), ("trn1n", 4), ("inf2", 4), ("trn2", 1), ("trn3", 0)]
)
def test_platform_limits_copies_of_grouped_heads(platform, allowed):
    """Each platform allows certain numbers of copies of a key/value head. On Trn3, NxD has no layer
    for grouped key/value heads.
    """
    grouped, whole = ModelSpec.preset("hlat-70b"), ModelSpec.preset("hlat-7b")
    check_platform(HLAT_7B, whole, platform)
    for copies in (1, 4):
        plan = HLAT_70B.replace(tensor_parallel=8 * copies)
        copied, never = "this is '{}'. Use tensor_parallel 8", "not allowed on '{}': NxD makes"
        message = (copied if allowed else never).format(platform)
        refused = pytest.raises(ConfigError, match=message)
        with contextlib.nullcontext() if copies <= allowed else refused:
            check_platform(plan, grouped, platform)


DEEPSPEED = HLAT_7B.replace(engine="deepspeed", zero_stage=1, sequence_parallel=False)


@pytest.fixture
def trn3(tmp_path) -> Site:
    """A site file of a user for a machine with Trainium 3 devices."""
    text = 'base = "trn1.32xlarge"\ndevice.name = "AWS Trainium3, one NeuronCore-v4"\n'
    (tmp_path / "trn3.toml").write_text(text)
    return Site.load(tmp_path / "trn3.toml")


@pytest.mark.parametrize(
    ("plan", "site", "message"),
    [
        *(
            (HLAT_7B, site, f"'neuron' trains on AWS Trainium alone, .* site '{site}' is")
            for site in ("perlmutter", "lumi", "dgx-h100", "tpu-v4")
        ),
        (HLAT_7B.replace(engine="native"), "trn1.32xlarge", "'native' trains on GPUs and CPU"),
        (DEEPSPEED, "eks-trn1", "'deepspeed' trains"),
        (HLAT_70B, "trn3", "num_kv_heads: 8 for num_heads 64 .*'neuron' is not allowed on 'trn3'"),
    ],
)
def test_plan_launch_and_rehearse_refuse_wrong_device(plan, site, message, trn3, tmp_path):
    """The devices of the site cannot run the plan's engine."""
    spec = ModelSpec.preset("hlat-70b" if plan is HLAT_70B else "hlat-7b")
    site = trn3 if site == "trn3" else Site.load(site)
    asked = {"spec": spec, "plan": plan, "recipe": RECIPE, "site": site}
    meetings = {
        "plan": lambda: search(spec, site, plan.num_devices, 1024, engine=plan.engine),
        "launch": lambda: kit.launch(tmp_path / "run", **asked),
        "rehearse": lambda: rehearse(**asked),
    }
    for meet in meetings.values():
        with pytest.raises(ConfigError, match=message):
            meet()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("site", ["trn1.32xlarge", "eks-trn1", "laptop"])
def test_check_site_accepts_devices_of_the_engine(site, trn3):
    check_site(ModelSpec.preset("hlat-70b"), HLAT_70B, Site.load(site))
    check_site(ModelSpec.preset("hlat-7b"), HLAT_7B, trn3)
    check_site(ModelSpec.preset("hlat-7b"), Plan(), Site.load("frontier"))
