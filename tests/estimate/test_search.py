"""The planner's search: the rules of `Plan`, the numbers of its formulas, explanations of the
layouts found, and refused input.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.site import Site
from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.engines.capabilities import ENGINES
from kit.errors import ConfigError
from kit.estimate.choose import explain
from kit.estimate.choose.candidates import allowed, candidates
from kit.estimate.choose.explain import answers
from kit.estimate.choose.machine import machine_of
from kit.estimate.choose.memory_advice import estimate_options
from kit.estimate.choose.nearest import measured_mfu
from kit.estimate.choose.panel import Estimate
from kit.estimate.choose.report import plan_report
from kit.estimate.choose.search import describe_layout, interval_text, search
from kit.estimate.fit import published
from kit.estimate.fit.calibrate import published_calibration
from kit.estimate.fit.store import causal_mfu
from kit.estimate.theory.activations import engine_kernels
from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layouts import CODES, DEGREES, EXCHANGES, RECOMPUTE, SCHEDULES, Layouts
from kit.estimate.theory.memory import memory
from kit.estimate.theory.step_time import step_time
from kit.papers.recipes import plan_arguments, published_recipe

FRONTIER, H100 = Site.load("frontier"), Site.load("dgx-h100")
SHAPES = {"num_layers": 8, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4}
SMALL = ModelSpec.llama(
    name="small", **SHAPES, ffn_hidden_size=768, vocab_size=4096, sequence_length=128
)
GPT_22B, GPT_175B, GPT_1T = (ModelSpec.preset(f"gpt-{size}") for size in ("22b", "175b", "1t"))
WHOLE = {"pipeline_parallel": [1], "zero_stage": [0]}
TP2_PP8 = {"tensor_parallel": [2], "pipeline_parallel": [8]}
LLAMA_405B = ModelSpec.preset("llama3.1-405b")


def random_plans(rng: np.random.Generator, count: int) -> Iterator[dict[str, Any]]:
    """Yields the fields of random plans on a few devices. Most of these plans break some rule of
    `Plan`.
    """
    for _ in range(count):
        t, p, r, c = rng.choice([1, 1, 2, 3, 4, 8], 4)
        yield dict(
            tensor_parallel=int(t),
            pipeline_parallel=int(p),
            data_parallel=int(r),
            context_parallel=int(c) if rng.random() < 0.2 else 1,
            context_exchange=str(rng.choice(EXCHANGES)) if rng.random() < 0.2 else "ring",
            virtual_stages=int(rng.choice([1, 2, 4])),
            zero_stage=int(rng.integers(4)),
            shard_size=int(rng.choice([1, 2, 4])) if rng.random() < 0.2 else None,
            sequence_parallel=bool(rng.random() < 0.5),
            schedule=str(rng.choice(SCHEDULES)),
            recompute=str(rng.choice(RECOMPUTE)),
            micro_batch_size=int(rng.choice([1, 2])),
            global_batch_size=int(rng.choice([8, 16, 24])),
            precision="bf16",
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_layout_mask_matches_plan_validation(engine):
    """Each rule can check arrays of layouts or the numbers of one plan. Both forms must accept the
    same plans.
    """

    def is_accepted(values):
        with contextlib.suppress(ConfigError):
            Plan(**values, engine=engine).check_shapes(SMALL)
            return True
        return False

    rows = list(random_plans(np.random.default_rng(3), 1500))
    accepted = [is_accepted(values) for values in rows]
    table = {name: [values[name] for values in rows] for name in rows[0] if name != "precision"}
    columns = table | {n: [known.index(v) for v in table[n]] for n, known in CODES.items()}
    columns["shard_size"] = [size or 0 for size in table["shard_size"]]
    columns["num_kv_heads"] = [
        SMALL.num_kv_heads * Plan(tensor_parallel=t, engine=engine).kv_replication(SMALL)
        for t in table["tensor_parallel"]
    ]
    layouts = dataclasses.replace(
        Layouts.of(SMALL, [Plan()]), **{name: np.array(each) for name, each in columns.items()}
    )
    assert allowed(layouts, SMALL, engine).tolist() == accepted and 20 < sum(accepted) < 750


def test_126_layers_are_offered_on_128_stages():
    """In Llama 3 405B (arXiv 2407.21783, section 3.3.2) the embedding and the loss each take the
    place of one layer, so 126 layers fit 128 stages.
    """
    layouts = candidates(LLAMA_405B, 8192, 2048)
    plan = layouts.select(layouts.num_stages == 128).plan(0)
    plan.check(LLAMA_405B, 8192)
    shares = [len(plan.stage_layers(LLAMA_405B, stage)) for stage in range(128)]
    assert shares == [0, *[1] * 126, 0]
    equal = candidates(LLAMA_405B, 8192, 2048, engine="deepspeed")
    assert (126 % equal.num_stages == 0).all(), "which deals equal shares of the blocks"


@pytest.mark.parametrize(
    "model, devices, batch, engine",
    [
        ("gpt-1t", 3072, 9600, "native"),
        ("gpt-175b", 1024, 10240, "deepspeed"),
        ("hlat-70b", 8192, 1024, "neuron"),
        ("demo", 8, 16, "native"),
        ("llama3.1-405b", 2048, 2048, "native"),
    ],
)
def test_candidates_are_valid_and_unique(model, devices, batch, engine):
    rng = np.random.default_rng(2)
    spec = ModelSpec.preset(model)
    layouts = candidates(spec, devices, batch, engine=engine)
    for i in rng.integers(0, len(layouts), 100):
        plan = layouts.plan(int(i), engine)
        plan.check(spec, devices)
        assert plan.global_batch_size == batch
    table = [np.broadcast_to(getattr(layouts, name), layouts.shape) for name in (*DEGREES, *CODES)]
    assert np.unique(table, axis=1).shape[1] == len(layouts) > 100


def test_zero_3_is_offered_with_shards_inside_nodes():
    """A given number of devices per node adds ZeRO 3 plans whose shard groups stay inside a node.
    It adds no other plans.
    """
    few, more = (candidates(SMALL, 16, 32, node_devices=node) for node in (0, 8))
    plans, offered = ({x.plan(i) for i in range(len(x))} for x in (few, more))
    hybrid = offered - plans
    assert plans < offered and len(offered) == len(more) < 1.25 * len(few)
    assert {(plan.tensor_parallel, plan.shard_size) for plan in hybrid} == {(1, 8), (2, 4), (4, 2)}
    assert all(each.zero_stage == 3 and not each.data_parallel % each.shard_size for each in hybrid)
    alone = [len(candidates(SMALL, 8, 32, node_devices=node)) for node in (0, 8)]
    assert alone[0] == alone[1], "one node: nothing to offer"
    found = search(SMALL, H100, 16, 32, only={"zero_stage": [3]})
    row = next(found.row(int(i)) for i in found.order if found.plan(int(i)).shard_size)
    assert f"ZeRO3/{row['shard_size']} " in describe_layout(row)


def test_only_restricts_candidates_or_is_refused():
    only = {"schedule": "zbv", "tensor_parallel": [2], "pipeline_parallel": [2, 4]}
    layouts = candidates(SMALL, 16, 32, only=only)
    plans = [layouts.plan(i) for i in range(len(layouts))]
    assert {plan.schedule for plan in plans} == {"zbv"}
    assert {plan.zero_stage for plan in plans} == {0, 1, 2}
    for only, message in (
        ({"tensor": [1]}, "plan.tensor: unknown"),
        ({"schedule": ["1f2b"]}, "Allowed: gpipe"),
        ({"tensor_parallel": [3]}, "no layout of 16 devices is left by"),
        ({"tensor_parallel": [3]}, "num_heads: .* is not divisible by .*tensor_parallel"),
    ):
        with pytest.raises(ConfigError, match=message):
            candidates(SMALL, 16, 32, only=only)


def test_search_numbers_match_formulas():
    found = search(GPT_22B, FRONTIER, 16, 640)
    rows = np.random.default_rng(1).integers(0, len(found.layouts), 300)
    plans = [found.plan(int(i)) for i in rows]
    layouts = Layouts.of(found.spec, plans)
    expected = step_time(layouts, Hardware.of(FRONTIER), Coefficients()).total_s
    assert found.step_time_s[rows] == pytest.approx(expected, rel=1e-4)
    used = memory(layouts, kernels=engine_kernels(FRONTIER.engine, FRONTIER.device)).used_bytes
    assert found.used_bytes[rows] == pytest.approx(used, rel=1e-5)


def test_best_is_fastest_within_max_risk():
    found = search(GPT_175B, FRONTIER, 128, 640, max_risk=0.1)
    best = int(found.order[0])
    risks = np.array([found.risk(int(i)) for i in np.argsort(found.step_time_s)[:500]])
    assert found.risk(best) <= 0.1 + 1e-6
    faster = np.flatnonzero(found.step_time_s < found.step_time_s[best])
    assert len(faster) and all(found.risk(int(i)) > 0.1 for i in faster)
    assert risks.max() > 0.99
    assert found.best == found.plan(best)
    lower = search(GPT_175B, FRONTIER, 128, 640, max_risk=0.001)
    assert lower.step_time_s[lower.order[0]] > found.step_time_s[best]


def test_pareto_front_has_all_undominated_layouts():
    found = search(SMALL, FRONTIER, 16, 32)
    time_s, used = found.step_time_s, found.used_bytes
    points = set(zip(time_s[found.pareto], used[found.pareto], strict=True))
    beaten = ((time_s[None] <= time_s[:, None]) & (used[None] < used[:, None])).any(1)
    beaten |= ((time_s[None] < time_s[:, None]) & (used[None] <= used[:, None])).any(1)
    assert points == set(zip(time_s[~beaten], used[~beaten], strict=True))


def test_answer_explains_time_memory_and_limit():
    found = search(GPT_175B, FRONTIER, 128, 640)
    assert found.title.endswith("not calibrated")
    alone = search(ModelSpec.preset("demo"), FRONTIER, 1, 1).title
    assert "on 1 device of frontier with" in alone and ", 1 sequence of 256 tokens: " in alone
    first, *others = answers(found, 4, tokens=3e11)
    assert all(first.row["step_time_s"] <= other.row["step_time_s"] for other in others)
    explanation = first.explain()
    assert 0.85 < explanation.simulated_share <= 1
    assert sum(first.time_terms_s.values()) == pytest.approx(first.row["step_time_s"], rel=1e-4)
    used = first.row["used_bytes"]
    assert sum(first.memory_terms_bytes.values()) == pytest.approx(used, rel=1e-4)
    assert explanation.limited_by.startswith(("memory: ", "computation: "))
    assert f"{explanation.nearest.run.step_time_s:.4g} s" in str(explanation.nearest)
    assert any("less memory" in text for text in explanation.other_choices)
    assert first.row["days"] == pytest.approx(3e11 / first.row["tokens_per_s"] / 86_400)
    first.plan.check(found.spec, 128)
    assert json.loads(json.dumps(first.to_dict()))["binding"] == explanation.limited_by
    assert "<table>" in first._repr_html_() and len(first._repr_html_()) < 4000


@pytest.mark.parametrize(
    ("model", "only", "message"),
    [
        ("gemma3-1b", {}, "spec.embedding_multiplier: "),
        ("gemma3-1b", {"context_parallel": [2]}, "spec.embedding_multiplier: "),
        ("demo", {"recompute": ["selective"], "zero_stage": [3]}, "plan.recompute: 'selective'"),
        ("demo", {"zero_stage": [2], "pipeline_parallel": [2]}, "plan.zero_stage: 2"),
    ],
)
def test_refusal_of_an_engine_names_no_searched_value(model, only, message):
    """An engine that can train no layout is refused with the reason that all layouts share. The
    message does not name a value such as schedule `gpipe`, which the user did not ask for.
    """
    site = Site.load("dgx-h100")
    with pytest.raises(ConfigError) as raised:
        search(ModelSpec.preset(model), site, 16, 8, engine="deepspeed", only=only)
    assert str(raised.value).startswith(message)


def test_nearest_run_has_its_global_batch():
    """Step times of two runs can be compared only if their batches are known."""
    (first,) = answers(search(ModelSpec.preset("llama3-8b"), Site.load("dgx-h100"), 64, 64), 1)
    nearest = first.explain().nearest
    sequences = nearest.run.plan.global_batch_size
    tokens = sequences * nearest.run.spec.sequence_length
    assert sequences > 1
    assert f"global batch {sequences:,} sequences = {tokens:,} tokens; " in str(nearest)


def test_windows_explain_the_difference_of_mfu_and_hfu():
    """Attention windows are the only reason for which MFU and HFU differ without recomputation."""
    spec = ModelSpec.preset("gemma3-1b").replace(sequence_length=8192)
    only = {"recompute": ["none"]}
    (first,) = answers(search(spec, Site.load("dgx-h100"), 8, 64, only=only), 1)
    assert first.row["hfu"] > 1.1 * first.row["mfu"]
    text = dict(first.facts())["MFU and HFU"]
    assert "22 of 26 layers have an attention window" in text
    assert "the 512 keys of the window" in text and "all 8,192 keys" in text
    whole = spec.replace(sequence_length=512)
    (first,) = answers(search(whole, Site.load("dgx-h100"), 8, 64, only=only), 1)
    assert first.row["hfu"] == first.row["mfu"] and "MFU and HFU" not in dict(first.facts())


ASKED = [
    ("gpt-1t", "frontier", 1024, 1024),
    ("gpt-1t", "frontier", 1024, 64),
    ("gpt-175b", "frontier", 1024, 10240),
    ("gpt-22b", "frontier", 16, 640),
    ("llama3-8b", "dgx-h100", 64, 1024),
    ("llama3.1-405b", "dgx-h100", 1024, 512),
    ("gpt-1t", "dgx-h100", 3072, 9600),
    ("hlat-70b", "trn1.32xlarge", 2048, 1024),
]


@pytest.mark.parametrize("model, site, devices, batch", ASKED)
def test_command_notebook_and_panel_agree(model, site, devices, batch):
    """The JSON and the table of `kit plan`, the function `answers`, and the panel show equal
    layouts in equal order with equal step times.
    """
    words = f"plan {model} --site {site} --devices {devices} --batch {batch}".split()
    told, shown = (CliRunner().invoke(app, [*words, *more]) for more in (["--json"], []))
    rows = json.loads(told.stdout)["answers"]
    place = Site.load(site)
    known, spec = published_calibration(place), ModelSpec.preset(model)
    found = search(spec, place, devices, batch, calibration=known)
    (first,) = answers(found, 1)
    assert rows[0] == json.loads(json.dumps(first.to_dict()))
    assert first.plan == found.best and found.order[0] == first.index
    times = [row["step_time_s"] for row in rows]
    assert times == sorted(times), "fastest first, by the number that is shown"
    column = re.findall(r"^\d +.*?  +([\d,.]+)  +[\d,.]+ to [\d,.]+  ", shown.stdout, re.M)
    printed = [float(text.replace(",", "")) for text in column]
    assert len(printed) == len(rows) and printed == sorted(printed)
    assert printed == pytest.approx(times, rel=1e-3)
    for row in rows:
        middle = np.sqrt(row["step_time_low_s"] * row["step_time_high_s"])
        assert middle == pytest.approx(row["step_time_s"], rel=1e-6), "its own interval"
    for answer in answers(found, 5):
        machine = machine_of(place, known, engine=answer.plan.engine)
        estimate = Estimate.of(spec, machine, answer.plan)
        row = answer.row
        interval = [row[f"step_time_{name}"] for name in ("s", "low_s", "high_s")]
        assert estimate.step_s == pytest.approx(interval, rel=1e-9)
        assert estimate.used_bytes[0] == pytest.approx(row["used_bytes"], rel=1e-9)
        layouts = Layouts.of(spec, [answer.plan])
        alone = step_time(layouts, known.hardware, known.coefficients).total_s
        assert alone == pytest.approx(row["step_time_s"], rel=1e-9)
        others = [text for text in answer.explain().other_choices if "with other degrees" in text]
        faster = [float(change) for text in others for change in re.findall(r"(-[\d.]+)%", text)]
        assert answer.index != first.index or not faster, "nothing is faster than the first"


def test_schedule_slower_than_closed_form_is_warned():
    """If there are fewer micro-batches than stages, the closed formula of the schedule zbv gives a
    step time that is too short.
    """
    only = {"tensor_parallel": [64], "schedule": ["zbv"]}
    known = published_calibration(FRONTIER)
    (answer,) = answers(search(GPT_1T, FRONTIER, 1024, 64, calibration=known, only=only), 1)
    explanation = answer.explain()
    assert explanation.simulated_share > 1
    assert any("simulated event by event" in text for text in explanation.warnings)


def test_tensor_parallelism_across_nodes_is_warned():
    known = published_calibration(FRONTIER)
    for degree in (8, 16):
        only = {"tensor_parallel": [degree]}
        (answer,) = answers(search(GPT_1T, FRONTIER, 1024, 1024, calibration=known, only=only), 1)
        warnings = answer.explain().warnings
        named = [text for text in warnings if "leaves the node of 8 devices" in text]
        assert bool(named) == (degree > 8)


def test_search_recomputes_fewest_blocks_that_fit():
    found = search(GPT_22B, FRONTIER, 16, 640)
    rows = np.flatnonzero(found.layouts.recompute_layers)
    assert len(rows) > 10 and found.feasible[rows].all()
    for row in rows[:20]:
        plan = found.plan(int(row))
        fewer = {"recompute_layers": plan.recompute_layers - 1}
        if plan.recompute_layers == 1:
            fewer = {"recompute": "none", "recompute_layers": None}
        plans = [plan.replace(**change) for change in ({}, fewer, {"recompute_layers": None})]
        layouts = Layouts.of(GPT_22B, plans, native=True, compiled=True)
        time_s, used_bytes = found.machine.evaluate(layouts)
        assert time_s[1] < time_s[0] < time_s[2] and used_bytes[1] > used_bytes[0] > used_bytes[2]
        blocks = plan.virtual_stages * len(plan.stage_layers(GPT_22B, 0))
        if blocks <= 16:  # with more blocks the search tries only multiples of a sixteenth
            assert used_bytes[1] > found.machine.max_used_bytes(0.05) >= used_bytes[0]
    assert f"recompute full ({plan.recompute_layers} block" in describe_layout(found.row(int(row)))


def test_answers_of_one_degree_suggest_no_other_degrees():
    """On 63 devices every layout found has tensor parallelism 1. The suggested changes do not
    include other degrees of parallelism.
    """
    report = plan_report("llama3-8b", site="dgx-h100", devices=63, batch=63)
    assert {answer.plan.tensor_parallel for answer in report.answers} == {1}
    told = [text for answer in report.answers for text in answer.to_dict()["changes"]]
    assert told and not any("with other degrees" in text for text in told)


def test_interval_text_has_three_significant_digits():
    assert interval_text({"step_time_low_s": 8.6149, "step_time_high_s": 11.46}) == "8.61 to 11.5"
    assert interval_text({"step_time_low_s": 579.6, "step_time_high_s": 1074.4}) == "580 to 1,074"


@pytest.fixture(scope="module")
def first():
    """Returns the fastest layout of the 22B model on two nodes of Frontier."""
    return answers(search(GPT_22B, FRONTIER, 16, 640), 1)[0]


@pytest.mark.slow
def test_rate_above_measured_ceiling_is_warned(first):
    rates = {"bf16": {"value": 40e12, "source": "a test"}}
    slow = FRONTIER.replace(device=FRONTIER.device.replace(matmul_flops_per_s=rates))
    assert not any("no matrix product" in text for text in first.explain().warnings)
    below = dataclasses.replace(first.search.machine, site=slow)
    doubted = dataclasses.replace(first, search=dataclasses.replace(first.search, machine=below))
    assert any("no matrix product was seen above 40" in text for text in doubted.explain().warnings)


def test_plan_report_has_rows_json_and_calibration():
    report = plan_report("gpt-22b", site="frontier", devices=16, batch=640, tokens=1e12, count=3)
    assert len(report.rows) == 3 and all(len(row) == len(report.header) for row in report.rows)
    data = json.loads(json.dumps(report.to_dict()))
    Plan.from_dict(data["plan"]).check(GPT_22B, 16)
    assert data["answers"][0]["days"] > 0
    assert dict(report.chosen.facts())["limited by"] == data["answers"][0]["binding"]
    assert report.search.title.endswith("calibrated on 18 runs") and data["calibration_runs"] == 18
    assert "calibrated on 18 runs" in dict(report.chosen.facts())["times"]
    assert "calibrated" in report.search._repr_html_()
    for answer, row in zip(report.answers, report.rows, strict=True):
        low, high = (answer.row[name] for name in ("step_time_low_s", "step_time_high_s"))
        assert low < answer.row["step_time_s"] < high and interval_text(answer.row) in row
    assert len(report.search._repr_html_()) < 4000


def test_trainium_plans_are_valid_for_neuron_engine():
    report = plan_report("hlat-70b", site="trn1.32xlarge", devices=8192, batch=1024, count=3)
    for answer in report.answers:
        assert answer.plan.engine == "neuron" and "engine neuron" in report.search.title
        answer.plan.check(report.search.spec, 8192)
    layouts = report.search.layouts
    assert 32 in layouts.tensor_parallel, "HLAT's own degree, with each key/value head four times"
    wide = layouts.select(layouts.tensor_parallel == 32)
    assert set(wide.num_kv_heads) == {32} and set(layouts.flash_attention) == {0}
    plan = wide.plan(0, "neuron")
    assert Layouts.of(report.search.spec, [plan]).num_kv_heads == 32
    with pytest.raises(ConfigError, match="'interleaved' is not allowed with engine 'neuron'"):
        only = {"schedule": "interleaved", "pipeline_parallel": [8]}
        plan_report("hlat-70b", site="trn1.32xlarge", devices=8192, batch=1024, only=only)


def test_trainium_zero_0_memory_matches_advice():
    """NxD without ZeRO stores no fp32 master weights. The example is HLAT's 7B model. A search over
    ZeRO stage 0 together with other stages is refused.
    """
    recipe, site = published_recipe("hlat-7b"), Site.load("trn1.32xlarge")
    spec, plan = ModelSpec.preset(recipe.model), recipe.plan
    only = {"zero_stage": [0], "tensor_parallel": [plan.tensor_parallel], "pipeline_parallel": [1]}
    found = search(spec, site, plan.num_devices, plan.global_batch_size, only=only)
    (index,) = [i for i in range(len(found.layouts)) if found.plan(i) == plan]
    (option,) = estimate_options(spec, plan, [{}], site.device)
    assert found.used_bytes[index] == pytest.approx(option.used_bytes, rel=1e-6)
    with pytest.raises(ConfigError, match="Name stage 0 or the others"):
        search(spec, site, 64, 64, only={"zero_stage": [0, 1]})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(devices=1021), "1,021 devices is not allowed for gpt-22b"),
        (dict(devices=4096, batch=7), "replicas must divide the batch"),
        (dict(devices=0), "num_devices: 0"),
        (dict(max_risk=1.5), "max_risk: 1.5"),
        (dict(site="frontir"), "Did you mean 'frontier'"),
        (dict(model="gpt-23b"), "spec.preset: 'gpt-23b' is unknown"),
        (dict(tokens=10), "less than one step"),
        (dict(site="trn1.32xlarge"), "'neuron' trains Llamas without biases"),
        (dict(choose=6), "5 layouts are shown: give 1 to 5"),
        (dict(model="gpt-1t"), "no layout of gpt-1t on 16 devices of frontier fits in memory"),
    ],
)
def test_plan_report_refuses_bad_input(change, message):
    values = dict(model="gpt-22b", site="frontier", devices=16, batch=640) | change
    with pytest.raises(ConfigError, match=message):
        plan_report(values.pop("model"), **values)


@pytest.mark.slow
def test_search_error_names_enough_devices():
    def fits(devices):
        with contextlib.suppress(ConfigError):
            return search(GPT_1T, FRONTIER, devices, 640).feasible.any()

    least = next(size for size in (2**i for i in range(5, 11)) if fits(size))
    with pytest.raises(ConfigError, match=r"What fits: \d+ devices with 640 seq") as refused:
        search(GPT_1T, FRONTIER, 16, 640)
    [said] = re.findall(r"What fits: (\d+) devices", str(refused.value))
    assert 16 < int(said) <= least and fits(int(said))


@pytest.mark.parametrize(
    "asked, only, message",
    [
        (
            "llama3.1-405b dgx-h100 64 64",
            {},
            r"\d+ devices with 64 seq.*; optimizer states in host memory",
        ),
        ("llama3.1-405b dgx-h100 512 64", WHOLE, "512 devices with 64 sequences: TP"),
        ("llama3.1-405b dgx-h100 1021 2048", {}, "allowed: 2,042 sequences, or 1,024 devices"),
        ("gpt-1t frontier 16 1", TP2_PP8, "What fits: nothing nearby"),
    ],
)
def test_search_error_names_nearby_choices_that_fit(asked, only, message):
    model, site, devices, batch = asked.split()
    with pytest.raises(ConfigError, match=message):
        search(ModelSpec.preset(model), Site.load(site), int(devices), int(batch), only=only)


def test_small_batch_is_named_as_cause_of_few_replicas():
    found = search(GPT_175B, FRONTIER, 512, 7)
    assert found.best.data_parallel == 1
    assert "7 sequences on 512 devices leave at most 1 replica" in str(found.advise_batch())
    assert found.advise_batch() in answers(found, 1)[0].explain().warnings
    assert search(GPT_175B, FRONTIER, 512, 1024).advise_batch() is None


def test_untried_tensor_parallelism_widens_interval():
    calibration = published_calibration(FRONTIER)

    def width(degree: int) -> float:
        only = {"tensor_parallel": [degree], "schedule": ["1f1b"]}
        found = search(GPT_175B, FRONTIER, 512, 512, calibration=calibration, only=only)
        best = int(found.order[0])
        named = "tensor parallelism across nodes" in found.prediction(best).unmeasured_features
        assert named == (degree > 16), "the most that a run of Frontier had"
        row = found.row(best)
        return float(row["step_time_high_s"] / row["step_time_low_s"])

    assert width(32) > width(8)
    perlmutter, spec = Site.load("perlmutter"), SMALL.replace(num_kv_heads=8)
    blind, wide = (
        search(spec, perlmutter, 8, 8, only={"tensor_parallel": [t]}).prediction(0) for t in (4, 8)
    )
    assert "tensor parallelism across nodes" in wide.unmeasured_features
    assert "tensor parallelism across nodes" not in blind.unmeasured_features


def test_unbelievable_speed_gives_no_better_rank() -> None:
    """With a factor of 1 and perfect efficiencies, many layouts are predicted as faster than
    BELIEVABLE_SHARE of the best matrix product. They are ranked as if they were at this share.
    """
    fast = {"gemm_efficiency": 1.0, "gemm_edge": 5.0, "flash_efficiency": 1.0, "factor": 1.0}
    fast |= {"memory_efficiency": 1.0, "torch_factor": 1.0}
    known = published_calibration(H100)
    known = dataclasses.replace(known, coefficients=known.coefficients.replace(**fast))
    found = search(ModelSpec.preset("llama3-8b"), H100, 64, 1024, calibration=known)
    ceiling = H100.device.matmul_flops_per_s["bf16"].value
    is_capped = found.believable_step_s[found.order] > 0
    assert is_capped.any() and not is_capped.all()
    ranked = np.maximum(found.step_time_s, found.believable_step_s)[found.order]
    assert np.all(np.diff(ranked) >= 0)
    index = int(found.order[np.argmax(is_capped)])
    executed = found.executed_flops_per_token(index)
    rate = 1024 * 8192 * executed / (64 * found.believable_step_s[index])
    assert rate == pytest.approx(0.9 * ceiling)
    first = answers(found)[0]
    said = any("not believable" in text for text in first.explain().warnings)
    assert said == bool(found.believable_step_s[first.index])


def test_warning_names_fast_tensor_degree_across_nodes():
    """The first layout has tensor parallelism 8. Its warning says that tensor parallelism 32, whose
    ranks are on several nodes, is among the fastest layouts.
    """
    asked, known = (GPT_1T, FRONTIER, 3072, 9600), published_calibration(FRONTIER)
    stages = {"pipeline_parallel": [32], "virtual_stages": [2], "micro_batch_size": [1]}
    found = search(*asked, calibration=known, only={"recompute": ["none", "full"], **stages})
    first = answers(found)[0]
    wide = {int(found.layouts.tensor_parallel[other]) for other in found.fastest(5)} - {8, 16}
    assert first.plan.tensor_parallel == 8 and max(wide) == 32
    (said,) = [text for text in first.explain().warnings if "leaves the node" in text]
    assert said.startswith("TP32 among the fastest layouts")
    inside = search(*asked, calibration=known, only={"tensor_parallel": [4, 8]})
    assert not any("leaves the node" in text for text in answers(inside)[0].explain().warnings)


def test_answer_names_gains_of_other_engines(first):
    overlap, offload = first.explain().other_engines
    assert overlap.endswith("%)")
    assert "GiB less a device" in offload
    told = dict(first.facts())["other engines"]
    assert told == f"features that the kit's engines lack: {overlap}; {offload}"


def test_nearest_run_outside_interval_is_warned(first, monkeypatch):
    near = dataclasses.replace(first.explain().nearest, distance=1.0, residual=0.01)
    far_off = dataclasses.replace(near, residual=2.0)
    for nearest, is_warned in ((near, False), (far_off, True)):
        monkeypatch.setattr(explain, "nearest_run", lambda *_, found=nearest: found)
        warnings = first.explain().warnings
        assert any("missed by more than" in text for text in warnings) == is_warned


def test_plan_report_takes_sequence_length_and_code_base():
    asked: dict[str, Any] = dict(site="dgx-h100", devices=64, batch=64, count=1)
    own, long, megatron = (
        plan_report("llama3-8b", **asked, **changes)
        for changes in ({}, {"sequence_length": 16384}, {"code_base": "megatron-core"})
    )
    assert "64 sequences of 8,192 tokens" in own.search.title
    assert "64 sequences of 16,384 tokens" in long.search.title
    assert (megatron.to_dict()["code_base"], own.to_dict()["code_base"]) == ("megatron-core", "kit")
    assert megatron.search.used_bytes.min() != own.search.used_bytes.min()
    assert any("megatron-core's kernels" in text for text in megatron.chosen.explain().warnings)
    with pytest.raises(ConfigError, match="Did you mean 'torchtitan'"):
        plan_report("llama3-8b", **asked, code_base="torchtitn")


def test_search_refuses_site_without_memory_size():
    bare = FRONTIER.replace(device=FRONTIER.device.replace(memory_bytes=None))
    with pytest.raises(ConfigError, match="memory_bytes"):
        search(SMALL, bare, 16, 32)


def test_search_of_1t_takes_under_half_a_second():
    spent = []
    for _ in range(4):
        start = time.process_time()
        found = search(GPT_1T, FRONTIER, 3072, 9600)
        spent.append(time.process_time() - start)
    assert len(found.layouts) > 50_000
    assert min(spent[1:]) < 0.5, "0.11 s where nothing else runs, after the first, which reads"


def test_nvfp4_plan_names_run_and_peak_of_its_format():
    """The nearest published run is in nvfp4. MFU is a fraction of the nvfp4 peak, so it is below
    100 %. A note has the ratio of this peak to the bf16 peak.
    """
    asked: dict[str, Any] = dict(
        site="gb300-nvl72", devices=64, batch=256, count=1, code_base="megatron-core"
    )
    wide, four = (
        plan_report("llama3.1-70b", **asked, precision=precision).chosen
        for precision in ("bf16", "nvfp4")
    )
    nearest = four.explain().nearest
    assert nearest.run.precision == "nvfp4" and abs(nearest.residual) < 0.2
    peaks = four.search.machine.site.device.peak_flops_per_s
    tokens = 256 * four.search.spec.sequence_length
    rate = tokens * four.search.spec.flops_per_token() / (four.row["step_time_s"] * 64)
    assert four.row["mfu"] == pytest.approx(rate / peaks["nvfp4"].value) and four.row["mfu"] < 0.5
    ratio = peaks["nvfp4"].value / peaks["bf16"].value
    rated = dict(four.facts())["rate"]
    assert f"of the peak in nvfp4, which is {ratio:.3g} times the peak in bf16" in rated
    assert "of the peak" not in dict(wide.facts())["rate"]
    bf16, fp8 = (measured_mfu("NVIDIA H100-SXM5-80GB", name) for name in ("bf16", "fp8"))
    assert bf16 and fp8 and bf16 < 0.5 and fp8 > 0.8


def test_hfu_of_recipe_counts_whole_blocks_like_the_paper():
    """The step time of DeepSpeed's layouts contains whole recomputed blocks, as in Megatron, whose
    HFU is about 4/3 of MFU. The kit's DeepSpeed engine executes fewer FLOPs, and a note says so.
    """
    asked: dict[str, Any] = plan_arguments("frontier-1t", 3072) | {"batch": 3072, "count": 1}
    answer = plan_report(**asked).chosen
    spec = answer.search.spec
    paper = spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE) / spec.flops_per_token()
    assert answer.row["hfu"] / answer.row["mfu"] == pytest.approx(paper, rel=1e-3)
    assert paper == pytest.approx(4 / 3, rel=0.01)
    rate = dict(answer.facts())["rate"]
    assert "HFU and step time count whole blocks" in rate and "engine deepspeed stops" in rate
    native = plan_report("llama3-8b", site="dgx-h100", devices=64, batch=1024, count=1).chosen
    assert "whole blocks" not in dict(native.facts())["rate"]


def test_causal_mfu_leaves_out_half_of_attention():
    """Llama-3-8B of OLMo-core: 9,500 tokens/s on one H100 with sequences of 4,096 tokens."""
    (run,) = (r for r in published.of_site("dgx-h100") if r.spec.name == "Llama-3-8B")
    matrices = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 100_352 * 4096
    executed = 6 * matrices + 6 * 32 * 4096 * 4096
    rate, peak = run.flops_per_s(), run.peak_flops_per_s
    assert rate and peak
    mfu = causal_mfu(rate / peak, run.spec)
    assert mfu == pytest.approx(9500 * executed / peak, rel=1e-3) and 0.45 < mfu < 0.46


def test_plan_is_compared_with_published_mfu_of_other_sequence_lengths(monkeypatch):
    """With 8,192 tokens, a larger share of the counted FLOPs is attention, of which a device
    executes half. The MFU is above that of the published runs with 4,096 tokens. Without masked
    pairs of tokens it is below.
    """
    question: dict[str, Any] = dict(site="dgx-h100", devices=64, batch=1024, count=1)
    answer = plan_report("llama3-8b", **question).chosen
    highest = measured_mfu("NVIDIA H100-SXM5-80GB", "bf16")
    causal = measured_mfu("NVIDIA H100-SXM5-80GB", "bf16", is_causal=True)
    assert highest and causal
    mfu = answer.row["mfu"]
    assert causal_mfu(mfu, answer.search.spec) < causal < highest < mfu
    facts = answer.explain().warnings
    assert not any("published runs on this device" in text for text in facts)
    monkeypatch.setattr(explain, "measured_mfu", lambda *_, **__: 0.4)
    (warning,) = [t for t in answer.explain().warnings if "published runs on this device" in t]
    assert "above the 40.0%" in warning


def test_plan_with_muon_needs_less_memory_and_more_time():
    """Both searches are limited to one layout. Engines that cannot gather matrices are refused."""
    only = {"tensor_parallel": [1], "pipeline_parallel": [1], "zero_stage": [1]}
    only |= {"micro_batch_size": [1], "recompute": ["full"], "recompute_layers": [None]}
    asked: Any = dict(site="dgx-h100", devices=8, batch=64, count=1, only=only)
    adamw = plan_report("llama3-8b", **asked)
    muon = plan_report("llama3-8b", **asked, optimizer="muon")
    assert "with Muon" in muon.search.title and "Muon" not in adamw.search.title
    optimizer, less = (r.search.machine.memory(r.search.layouts).terms() for r in (adamw, muon))
    spec = ModelSpec.preset("llama3-8b")
    matrices = spec.num_layers * spec.matmul_params_per_layer
    saved = optimizer["optimizer"] - less["optimizer"]
    assert saved == pytest.approx(4 * matrices / 8)
    assert (muon.search.step_time_s > adamw.search.step_time_s).all()
    with pytest.raises(ConfigError, match=r"search.optimizer: 'muon' .* engine 'deepspeed'"):
        plan_report("llama3-8b", **asked, engine="deepspeed", optimizer="muon")
