"""Terms of the step time and memory that few plans use. Each changes the estimate as its formula
states.
"""

import contextlib
import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.estimate.choose.candidates import candidates, single_precision
from kit.estimate.choose.explain import answers
from kit.estimate.choose.report import plan_report
from kit.estimate.choose.search import describe_layout, search
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.communication import GroupLinks, all_gather_seconds, exposed_seconds
from kit.estimate.theory.hardware import NARROW_CEILING, Coefficients, Hardware
from kit.estimate.theory.layer import layer_params, product_seconds
from kit.estimate.theory.layouts import EXCHANGES, SCHEDULES, Layouts, cast_bytes
from kit.estimate.theory.memory import memory_by_stage
from kit.estimate.theory.orders import Order
from kit.estimate.theory.schedule import simulate
from kit.estimate.theory.step_time import exposed_trips, step_time

H100 = Site.load("dgx-h100")
C = Coefficients()
PARTS = ("forward_s", "backward_input_s", "backward_weight_s")
LLAMA = ModelSpec.preset("llama3-8b").replace(sequence_length=32_768)
SHAPES = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4}
SMALL = LLAMA.replace(**SHAPES, ffn_hidden_size=768, vocab_size=4096, sequence_length=128)


def plan(**changes):
    base = {"tensor_parallel": 2, "precision": "bf16", "zero_stage": 1, "global_batch_size": 32}
    return Plan(**{**base, **changes})


def timed(*plans, **kernels):
    layouts = Layouts.of(LLAMA, plans, **kernels)
    hardware = Hardware.of(H100, plans[0].precision)
    return step_time(layouts, hardware, C), GroupLinks(layouts, hardware, C), layouts


def test_ring_attention_sends_hide_behind_attention():
    """The number of sent bytes grows with the context-parallel ranks and with the key/value
    heads.
    """
    time, links, x = timed(plan(), plan(context_parallel=2), plan(context_parallel=4))
    tokens = LLAMA.sequence_length / x.context_parallel
    kv = LLAMA.hidden_size * 8 / 32
    once = 4 * tokens * kv / 2 / links.context.rate + links.context.latency_s
    blocks = (x.context_parallel - 1) * once
    attention = time.layer.terms_s["attention"] / 3.5
    assert time.layer.terms_s["context_parallel"] == pytest.approx(
        3 * exposed_seconds(blocks, attention)
    )
    assert time.terms_s["context_parallel"][0] == 0 < time.terms_s["context_parallel"][1]
    assert attention == pytest.approx(attention[0] / x.context_parallel), "equal parts of the mask"
    assert (np.diff(time.total_s) < 0).all(), "ranks more"


def test_all_to_all_traffic_is_fully_exposed():
    plans = [plan(context_parallel=c, context_exchange="all_to_all") for c in (2, 4)]
    time, links, x = timed(*plans)
    tokens, c = LLAMA.sequence_length / x.context_parallel, x.context_parallel
    sent = (c - 1) / c * 2 * tokens * (2 * LLAMA.hidden_size + 2 * LLAMA.hidden_size * 8 / 32) / 2
    once = sent / links.context.rate + 2 * links.context.latency_s
    assert time.layer.terms_s["context_parallel"] == pytest.approx(2 * once)
    ring, _, _ = timed(plan(context_parallel=2))
    assert time.terms_s["gemm"][0] == pytest.approx(ring.terms_s["gemm"][0])


def test_context_parallelism_divides_memory():
    """The ranks of context parallelism divide activations and logits, and they shard the optimizer
    states.
    """
    halved = plan(context_parallel=2)
    plans = (plan(), halved, halved.replace(context_exchange="all_to_all"))
    one, two, ulysses = (memory_by_stage(Layouts.of(LLAMA, [each])) for each in plans)
    assert two.activations == pytest.approx(one.activations / 2)
    assert two.embedding_logits == pytest.approx(one.embedding_logits / 2)
    assert two.bytes_per_param["optimizer"] == pytest.approx(one.bytes_per_param["optimizer"] / 2)
    tokens, h, kv = LLAMA.sequence_length / 2, LLAMA.hidden_size, LLAMA.hidden_size / 4
    assert two.buffers - one.buffers == pytest.approx(8 * kv / 2 * tokens)
    assert ulysses.buffers - one.buffers == pytest.approx(4 * (h + kv) / 2 * tokens)
    twice = ulysses.activations - two.activations
    assert twice == pytest.approx(32 * 2 * h / 2 * tokens), "the result lies there twice"


def test_context_parallel_candidates_match_valid_plans():
    expected = set()
    choices = itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), EXCHANGES, range(4), (False, True)
    )
    for t, c, p, exchange, zero, sequence in choices:
        r = 8 // (t * c * p)
        if t * c * p * r != 8 or (c * r == 1 and zero):
            continue
        degrees = {"tensor_parallel": t, "context_parallel": c, "pipeline_parallel": p}
        rest = {"zero_stage": zero, "sequence_parallel": sequence, "global_batch_size": 8}
        with contextlib.suppress(ConfigError):
            made = plan(**degrees, **rest, data_parallel=r, context_exchange=exchange)
            made.check_shapes(SMALL, 8)
            expected.add(made)
    asked = {"recompute": "none", "schedule": "1f1b", "micro_batch_size": 1}
    found = candidates(SMALL, 8, 8, only={**asked, "context_parallel": [1, 2, 4]})
    assert {found.plan(i) for i in range(len(found))} == expected
    assert len(found) == len(expected) > 50
    assert (candidates(SMALL, 8, 8).context_parallel == 1).all(), "only where it is asked for"
    with pytest.raises(ConfigError, match="no layout of 8 devices is left by context_exchange"):
        candidates(SMALL, 8, 8, only={"context_exchange": "all_to_all"})


def test_context_parallel_plans_are_warned_as_not_trained():
    found = search(LLAMA, H100, 16, 16, only={"context_parallel": [4]})
    answer = answers(found, 1)[0]
    assert answer.plan.num_devices == 16 and " CP4" in describe_layout(answer.row)
    explanation = answer.explain()
    assert any("context_parallel 4: the kit plans this" in text for text in explanation.warnings)
    assert "context parallelism" in found.prediction(answer.index).unmeasured_features
    assert 0.85 < explanation.simulated_share <= 1
    with pytest.raises(ConfigError, match="context_parallel: 4 is not trained .* plans this"):
        answer.plan.check(LLAMA, 16)


def test_fp8_products_are_faster_and_add_casts():
    """The speed-up equals the ratio of the site's fp8 and bf16 peaks. Casts to fp8 add memory
    traffic.
    """
    (wide, _, x), (narrow, _, _) = timed(plan()), timed(plan(precision="fp8"))
    rate = Hardware.of(H100).memory_bytes_per_s * C.memory_efficiency
    tokens, h, f = LLAMA.sequence_length, LLAMA.hidden_size, LLAMA.ffn_hidden_size
    numbers = tokens * (h / 2 + 2 * h + (h + h / 2) / 2) + layer_params(x) / 2
    more = narrow.layer.terms_s["elementwise"] - wide.layer.terms_s["elementwise"]
    assert more == pytest.approx(4 * numbers / rate)
    rates = Hardware.of(H100, "fp8").matmul_flops_per_s / Hardware.of(H100).matmul_flops_per_s
    assert 1.7 < float((wide.layer.terms_s["gemm"] / narrow.layer.terms_s["gemm"])[0]) < rates
    assert narrow.layer.terms_s["attention"] == wide.layer.terms_s["attention"]
    logits = [time.terms_s["embedding_logits"] for time in (narrow, wide)]
    assert logits[0] == pytest.approx(logits[1]), "they stay in bf16"
    unfused, plain = (
        timed(each, fused_norm=False)[0].layer.terms_s["elementwise"]
        for each in (plan(precision="fp8"), plan())
    )
    numbers += tokens * (2 * h + f / 2 + 2 * f / 2)
    assert unfused - plain == pytest.approx(4 * numbers / rate)


def test_fp8_ceiling_is_measured_or_share_of_peak():
    device = H100.device.replace(watts=None)
    measured, rates = H100.replace(device=device), device.matmul_flops_per_s
    slow = {**rates, "fp8": rates["fp8"].replace(value=9e14)}
    slower, open_ = (
        H100.replace(device=device.replace(matmul_flops_per_s=each)) for each in (slow, {})
    )
    assert Hardware.of(measured, "fp8").matmul_flops_per_s == 1402.6e12
    assert Hardware.of(slower, "fp8").matmul_flops_per_s == 9e14
    assert Hardware.of(open_, "fp8").matmul_flops_per_s == pytest.approx(NARROW_CEILING * 1979e12)
    assert Hardware.of(slower, "fp8").attention_flops_per_s == 813e12, "attention stays in bf16"
    with pytest.raises(ConfigError, match=r"selene lacks device\.peak_flops_per_s\.fp8"):
        Hardware.of(Site.load("selene"), "fp8")


def test_power_limit_lowers_matrix_product_rate():
    cool, hot = (
        H100.replace(device=H100.device.replace(watts={"value": watts, "source": "a test"}))
        for watts in (5000, 350)
    )
    assert Hardware.of(cool, "fp8").matmul_flops_per_s == 1402.6e12
    assert Hardware.of(hot, "fp8").matmul_flops_per_s == pytest.approx(1402.6e12 / 2 ** (1 / 3))


def test_interleaving_widens_gradient_overlap_window():
    fields = dict(tensor_parallel=1, pipeline_parallel=4, data_parallel=64, zero_stage=1)
    fields |= dict(global_batch_size=64 * 8)
    many = plan(**fields, virtual_stages=8, schedule="interleaved")
    (plain, one, rounds) = (
        timed(each, native=False, data_overlap=on)[0]
        for each, on in ((plan(**fields), False), (plan(**fields), True), (many, True))
    )
    assert one.overlap_window_s == pytest.approx(one.inner_stage_s), "the last micro-batch alone"
    assert rounds.overlap_window_s == pytest.approx(rounds.inner_stage_s * (1 + 7 * 4) / 8)
    waits = [float(each.terms_s["data_parallel"][0]) for each in (plain, one, rounds)]
    assert waits[0] > 2 * waits[1] > 4 * waits[2] > 0


def test_contention_is_added_only_on_shared_links():
    """A full fat tree has no contention between nodes. Its step time still grows by less than 1 %,
    because a step waits for the slowest of more ranks.
    """
    plans = [
        plan(tensor_parallel=8, data_parallel=ranks, global_batch_size=8 * ranks)
        for ranks in (512, 1024)
    ]
    x = Layouts.of(LLAMA, plans, native=False, data_overlap=True)
    free = Hardware.of(H100)
    before, after = step_time(x, free, C).total_s
    lone, crowd = step_time(x, dataclasses.replace(free, contention=1.0), C).total_s
    assert 1.0 < after / before < min(1.01, crowd / lone)
    assert crowd > after, "where links are shared"


def test_mxfp8_casts_move_more_bytes_than_fp8():
    """In mxfp8 each block of numbers has its own scale, which is computed and stored separately."""
    runs = [cast_bytes(precision, is_native=False) for precision in ("bf16", "fp8", "mxfp8")]
    assert runs[0] == 0 < runs[1] < runs[2]
    assert cast_bytes("fp8", is_native=True) < runs[1]


def test_fp8_is_planned_but_refused_for_training():
    report = plan_report("llama3-8b", site="dgx-h100", devices=16, batch=64, precision="fp8")
    chosen = report.chosen
    assert chosen.plan.precision == "fp8" and report.to_dict()["precision"] == "fp8"
    assert " in fp8" in report.search.title
    assert any("precision fp8: the kit plans this" in text for text in chosen.explain().warnings)
    untried = report.search.prediction(chosen.index).unmeasured_features
    assert "number format below bf16" not in untried, "seven published runs of the site have it"
    with pytest.raises(ConfigError, match="precision: 'fp8' is not trained"):
        chosen.plan.check(report.search.spec)
    with pytest.raises(ConfigError, match="'fp8' is not known of NVIDIA A100"):
        search(LLAMA, Site.load("selene"), 16, 16, precision="fp8")


@pytest.mark.parametrize(
    "schedule, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
)
@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_few_micro_batches_match_simulated_makespan(schedule, v, m):
    """The cases have fewer micro-batches than pipeline stages."""
    p, sent = 8, 0.25
    order = Order.of(schedule, pipeline_parallel=p, num_microbatches=m, virtual_stages=v)
    third: dict[str, Any] = dict.fromkeys(PARTS, 1 / v)
    simulated = simulate(order, **third, send_s=sent).makespan_s
    trips = exposed_trips(p, v, m, SCHEDULES.index(schedule), 0.7)
    bubble = 3 * (p - 1) / v + (v - 1) / v * (p - m) * 3
    assert simulated == pytest.approx(3 * m + bubble + 2 * v * sent * float(trips))
    fitted = exposed_trips(p, v, 8, SCHEDULES.index(schedule), 0.7)
    assert fitted == pytest.approx(8 * 0.7), "of no fewer"


def test_few_micro_batches_expose_every_pipeline_send():
    x = Layouts.of(LLAMA, [plan(pipeline_parallel=8, global_batch_size=batch) for batch in (2, 8)])
    hardware = Hardware.of(H100)
    slow, fast = (
        step_time(x, dataclasses.replace(hardware, network_bytes_per_s=400e9 * factor), C).terms_s
        for factor in (0.5, 1.0)
    )
    few, many = slow["pipeline_send"] - fast["pipeline_send"]
    waits = 7 / (8 * C.pipeline_exposed)
    assert few / many == pytest.approx(waits), "p - 1 waits, not m times a part"
    assert slow["bubble"][0] == pytest.approx(fast["bubble"][0])


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_mixture_of_experts_config_is_refused(tmp_path, key):
    shapes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config, message = (
        {"model_type": "llama", **shapes},
        f"{key}: 8 .* mixture of .* dense models only",
    )
    for file, table in (("config.json", config), ("spec.json", LLAMA.to_dict())):
        (tmp_path / file).write_text(json.dumps({**table, key: 8}))
        with pytest.raises(ConfigError, match=message):
            plan_report(str(tmp_path / file), site="dgx-h100", devices=8, batch=8)


def test_zero_3_exposes_first_gather_and_last_scatter():
    """The other ZeRO 3 collectives overlap with the computation of the layers. Only the part that
    the layers do not hide is exposed.
    """
    plans = [
        plan(tensor_parallel=1, data_parallel=64, zero_stage=3, global_batch_size=64 * m)
        for m in (1, 4)
    ]
    for width, kernels in ((2, {}), (1, {"gathered_bytes": 1.0})):
        time, links, x = timed(*plans, **kernels)
        params = 32 * layer_params(x) + LLAMA.vocab_size * LLAMA.hidden_size
        gather = all_gather_seconds(width * params, x.num_shards, links.shard, steps=32)
        scatter = all_gather_seconds(4 * params, x.num_shards, links.shard, steps=32)
        work = 32 * time.layer.total_s + C.microbatch_s
        seen = (
            exposed_seconds(gather, work / 3)
            + exposed_seconds(gather + scatter, work * 2 / 3)
            + gather / 32
        )
        moved = (2 * 2 * width + 2 + 4) * params
        seen = seen + moved / time.layer.memory_bytes_per_s
        found = time.terms_s["data_parallel"] / time.factor
        assert found == pytest.approx(x.num_microbatches * seen + scatter / 32)
    published, own = (timed(*plans, native=native)[0] for native in (False, True))
    assert (published.terms_s["data_parallel"] != own.terms_s["data_parallel"]).all(), (
        "published rows keep the form that they were fitted with"
    )


def test_fsdp2_zero_2_reduces_gradients_of_each_micro_batch():
    plans = [
        plan(tensor_parallel=1, data_parallel=64, zero_stage=stage, global_batch_size=64 * 4)
        for stage in (1, 2)
    ]
    each, once = (timed(*plans, reduces_once=on)[0] for on in (False, True))
    assert once.data_parallel_s[1] == pytest.approx(once.data_parallel_s[0])
    assert each.data_parallel_s[0] == pytest.approx(once.data_parallel_s[0])
    params = 32 * layer_params(once.layouts) + LLAMA.vocab_size * LLAMA.hidden_size
    scatter = all_gather_seconds(4 * params, once.layouts.num_shards, once.links.shard, steps=32)
    work = 32 * once.layer.total_s + C.microbatch_s
    copy = 6 * params / once.layer.memory_bytes_per_s
    seen = 3 * (exposed_seconds(scatter, work * 2 / 3) + copy)
    assert each.data_parallel_s[1] - once.data_parallel_s[1] == pytest.approx(seen[1])


def test_eager_elementwise_traffic_exceeds_compiled():
    """Each operation of a block that is not compiled reads its inputs from memory and writes its
    outputs.
    """
    rate = Hardware.of(H100).memory_bytes_per_s * C.memory_efficiency
    eager, fused, compiled = (
        timed(plan(sequence_parallel=True, compile=is_compiled), native=native)[0].layer.terms_s
        for native, is_compiled in ((True, False), (False, False), (True, True))
    )
    tokens, h, f = LLAMA.sequence_length, LLAMA.hidden_size, LLAMA.ffn_hidden_size
    more = tokens * (48 * (h + h / 4) + 4 * f) / 2 / rate
    assert eager["elementwise"] - fused["elementwise"] == pytest.approx(2.6 * more)
    less = tokens * 4 * h / 2 / rate
    assert fused["elementwise"] - compiled["elementwise"] == pytest.approx(2.6 * less)
    gpt = Layouts.of(ModelSpec.preset("gpt-22b"), [plan()])
    plain = dataclasses.replace(gpt, native=np.array(False))
    times = [step_time(each, Hardware.of(H100), C).total_s for each in (gpt, plain)]
    assert times[0] == pytest.approx(times[1] * C.torch_factor), "no rotary, no gate: equal kernels"


def test_single_precision_is_kept_and_accurate():
    found = search(ModelSpec.preset("gpt-1t"), H100, 512, 512, only={"zero_stage": [1, 3]})
    narrow, machine = single_precision(found.layouts), found.machine
    for value in (lambda x: machine.step_time(x).total_s, lambda x: machine.memory(x).used_bytes):
        assert value(narrow).dtype == np.float32
        assert value(narrow) == pytest.approx(value(found.layouts), rel=1e-5)


def test_other_code_base_has_no_native_kernels():
    ours, theirs = (
        search(LLAMA, H100, 16, 16, kernels=kernels).layouts for kernels in (None, MEGATRON)
    )
    assert np.all(ours.native) and np.any(ours.compiled)
    assert not np.any(theirs.native) and not np.any(theirs.compiled)


def test_separate_inputs_repeat_tensor_parallel_collectives():
    """Five column-split matrices reduce the gradients of their inputs separately. Eager blocks also
    gather each input separately. With one sequence per micro-batch a gather needs no copy.
    """
    spec = ModelSpec.preset("llama3-8b")
    plans = [plan(tensor_parallel=4, sequence_parallel=sp) for sp in (True, False)]

    def sums(**kernels):
        time = step_time(Layouts.of(spec, plans, **kernels), Hardware.of(H100), C)
        return time.layer.tensor_sum_s / 2, time.layer.tensor_sums_s

    half, (forward, backward) = sums(compiled=True)
    copy = 4 * spec.sequence_length * spec.hidden_size / (3.35e12 * C.memory_efficiency)
    assert forward == pytest.approx([4 * half[0] + 2 * copy, 4 * half[1]])
    assert backward == pytest.approx(forward)
    _, (compiled, compiled_backward) = sums(compiled=True, separate_inputs=True)
    assert compiled == pytest.approx(forward)
    more = [3 * (half[0] + copy), 6 * half[1]]
    assert compiled_backward == pytest.approx(backward + more)
    _, (eager, _) = sums(compiled=False, separate_inputs=True)
    assert eager - forward == pytest.approx([3 * half[0], 0], abs=1e-12)


def test_gathered_logits_repeat_loss_on_tensor_ranks():
    plans = [plan(tensor_parallel=4)]
    split, whole = (timed(*plans, gathers_logits=on)[0] for on in (False, True))
    size = 2 * LLAMA.sequence_length * LLAMA.vocab_size
    gather = all_gather_seconds(size, np.array([4.0]), whole.links.tensor)
    loss = 21 * LLAMA.sequence_length * LLAMA.vocab_size / whole.layer.memory_bytes_per_s
    assert whole.logits_s - split.logits_s == pytest.approx(gather + 0.75 * loss)


def test_async_tensor_parallelism_hides_collectives():
    """A matrix product is split into parts. The computation of one part overlaps with the
    collective of another part.
    """
    spec, t = ModelSpec.preset("llama3-8b"), 8
    layouts = {
        (sp, on): Layouts.of(
            spec, [plan(tensor_parallel=t, sequence_parallel=sp)], tensor_overlap=on
        )
        for sp, on in itertools.product((False, True), repeat=2)
    }
    hardware = Hardware.of(H100)
    times = {key: step_time(x, hardware, C) for key, x in layouts.items()}
    whole = [times[False, on].layer.terms_s for on in (True, False)]
    assert whole[0] == whole[1], "sums without sequence parallelism cannot be cut"
    plain, cut = times[True, False].layer.terms_s, times[True, True].layer.terms_s
    moved = np.sqrt((plain["gemm"] / 3) ** 2 - _products(layouts[True, False], hardware, 1) ** 2)
    gemm = np.hypot(_products(layouts[True, True], hardware, t), moved)
    assert cut["gemm"] == pytest.approx(3 * gemm) and cut["gemm"] > 1.01 * plain["gemm"]
    forward, beside = plain["tensor_parallel"] / 2, (t - 1) / t * gemm
    seen = exposed_seconds(forward, beside) + exposed_seconds(forward, 2 * beside)
    assert cut["tensor_parallel"] == pytest.approx(seen) and seen < 0.6 * plain["tensor_parallel"]
    assert times[True, True].total_s < times[True, False].total_s


def _products(x, hardware, parts):
    tokens, h = x.micro_batch_size * x.sequence_length / parts, x.hidden_size
    width = layer_params(x) / x.tensor_parallel / h
    return parts * product_seconds(tokens, h, width, 4.0, hardware.matmul_flops_per_s, C)


def test_fixed_step_time_grows_with_log_of_ranks():
    ranks = np.array([1, 2, 8, 16, 8192])
    plans = [plan(tensor_parallel=1, data_parallel=int(r), global_batch_size=8192) for r in ranks]
    time = timed(*plans)[0]
    overhead = time.terms_s["overhead"] / time.factor - 8192 / ranks * C.microbatch_s
    node, network = 8 * C.node_latency_s, 8 * C.network_latency_s
    expected = [0, node, 3 * node, 3 * node + network, 3 * node + 10 * network]
    assert overhead - C.step_s == pytest.approx(expected)


def test_ring_rate_follows_spanned_links():
    """In a node of eight MI300X a pair of devices shares only one link. On MI250X the
    tensor-parallel pair uses the fast links.
    """
    for name, pair, node in (("mi300x", 64e9, 448e9), ("frontier", 200e9, 75e9)):
        hardware = Hardware.of(Site.load(name))
        plans = [plan(tensor_parallel=1, data_parallel=ranks) for ranks in (2, 8)]
        plans.append(plan(tensor_parallel=4, data_parallel=2))
        layouts = Layouts.of(LLAMA, plans)
        rate = GroupLinks(layouts, hardware, C).data.rate / C.data_efficiency
        assert rate == pytest.approx([pair, node, min(pair, node)]), name
        around = Layouts.of(LLAMA, [plan(tensor_parallel=1, context_parallel=8)])
        assert GroupLinks(around, hardware, C).context.rate == pytest.approx(
            node * C.node_efficiency
        )


def test_published_zero_3_gathers_twice_scatters_once():
    """For engines other than the native one, two gathers and one reduce-scatter overlap with each
    micro-batch.
    """
    many = [
        plan(tensor_parallel=1, data_parallel=64, zero_stage=3, global_batch_size=64 * m)
        for m in (1, 4)
    ]
    time, links, layouts = timed(*many, native=False)
    gather, scatter = (
        all_gather_seconds(size * time.device_params, np.array(64.0), links.shard, steps=32)
        for size in (2.0, 4.0)
    )
    one = exposed_seconds(2 * gather + scatter, time.inner_stage_s)
    assert time.data_parallel_s == pytest.approx(one * np.array([1, 4]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device.memory_bytes", 80),
        ("device.memory_bytes_per_s", 3350),
        ("device.watts", 0.7),
        ("links.inter_node_bytes_per_s", 400),
        ("device.matmul_flops_per_s.bf16", 1.2e15),
    ],
)
def test_site_number_in_wrong_unit_is_refused(name, value):
    part, field, *dtype = name.split(".")
    record = getattr(H100, part)
    fact = getattr(record, field)
    if dtype:
        changed = fact | {dtype[0]: fact[dtype[0]].replace(value=value)}
    else:
        changed = fact.replace(value=value)
    site = H100.replace(**{part: record.replace(**{field: changed})})
    with pytest.raises(ConfigError, match=rf"{name}: .*(not believable|above the peak)"):
        Hardware.of(site)
