"""The planner's step time: its terms add up to the total, it respects physical limits, and each
option of a plan changes it as expected.
"""

import dataclasses

import numpy as np
import pytest

from cluster.record import ConfigError
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.muon import orthogonalisation_flops
from kit.estimate.fit import published
from kit.estimate.theory.communication import (
    GroupLinks,
    Link,
    all_gather_seconds,
    all_reduce_seconds,
    exposed_seconds,
)
from kit.estimate.theory.hardware import BOUNDS, NAMES, Coefficients, Hardware
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.step_time import TERMS, step_time

SELENE = Hardware.of(Site.load("selene"))
COSTS = ("_s", "edge", "contention", "sharing", "launches", "bytes")
PERFECT = Coefficients(
    **{name: low if name.endswith(COSTS) else 1.0 for name, (low, _) in BOUNDS.items()}
)
ALONE = {"tensor_parallel": 1, "pipeline_parallel": 1}


def plan(**changes):
    degrees = {"tensor_parallel": 8, "pipeline_parallel": 8, "data_parallel": 2}
    return Plan(**{**degrees, "global_batch_size": 64, "precision": "bf16", **changes})


def seconds(*plans, spec="gpt-175b", coefficients=None, hardware=SELENE, **kernels):
    layouts = Layouts.of(ModelSpec.preset(spec), plans, **kernels)
    return step_time(layouts, hardware, coefficients or Coefficients())


def test_terms_add_up_to_total_for_published_runs():
    runs = published.load()[::7]
    layouts = published.layouts(runs)
    result = step_time(layouts, SELENE, Coefficients())
    assert list(result.terms_s) == list(TERMS)
    assert sum(result.terms_s.values()) == pytest.approx(result.total_s, rel=1e-12)
    assert all((term >= -1e-12).all() for term in result.terms_s.values())


def test_no_layout_exceeds_matrix_product_ceiling():
    runs = [run for run in published.load() if run.system == "KAIST A100 node"]
    layouts = published.layouts(runs)
    flops = [run.spec.hardware_flops_per_token(run.plan.recompute, whole=True) for run in runs]
    rate = step_time(layouts, SELENE, PERFECT).tokens_per_s * flops / layouts.num_devices
    assert (rate < SELENE.matmul_flops_per_s).all()


def test_price_is_from_device_hours_or_unknown():
    trn1 = Hardware.of(Site.load("trn1.32xlarge"))
    layout = plan(pipeline_parallel=1, data_parallel=8)
    result = seconds(layout, spec="hlat-7b", hardware=trn1)
    assert result.price(1e9) == pytest.approx(result.days(1e9) * 24 * 64 * 21.5 / 32)
    assert np.isnan(seconds(plan()).price(1e9)).all()


def test_more_micro_batches_shrink_bubble_share():
    few, many = seconds(plan(global_batch_size=16)), seconds(plan(global_batch_size=256))
    share = [float((each.terms_s["bubble"] / each.total_s)[0]) for each in (few, many)]
    assert share[0] > 0.3 and share[1] < 0.08
    assert few.terms_s["bubble"] == pytest.approx(many.terms_s["bubble"])


def test_interleaving_and_zero_bubble_shrink_bubble():
    """Three virtual stages divide the pipeline bubble by 3. The zero-bubble schedule divides the
    rest by 3 again.
    """
    plain = seconds(plan()).terms_s["bubble"]
    interleaved = seconds(plan(schedule="interleaved", virtual_stages=3)).terms_s["bubble"]
    zero = seconds(plan(schedule="zero_bubble", virtual_stages=3)).terms_s["bubble"]
    assert interleaved == pytest.approx(plain / 3, rel=0.05)
    assert zero == pytest.approx(interleaved / 3, rel=1e-6)


def test_full_recomputation_costs_a_forward_pass():
    none, full = seconds(plan(compile=True)), seconds(plan(compile=True, recompute="full"))
    assert 1.2 < float((full.total_s / none.total_s)[0]) < 1.4
    assert none.terms_s["recompute"] == 0


def test_eager_block_skips_recomputing_last_product():
    """The kit's engine does not recompute the last matrix product of a block, which takes 2 T h f
    FLOPs (T tokens, hidden size h, feed-forward size f). A Megatron block with these shapes is
    recomputed completely.
    """
    spec, alone = ModelSpec.preset("gpt-22b"), plan(**ALONE, recompute="full")
    ours, megatron = (
        seconds(alone, spec=spec.name, coefficients=PERFECT, native=np.array([native]))
        for native in (True, False)
    )
    saved = megatron.terms_s["recompute"] - ours.terms_s["recompute"]
    saved /= alone.num_microbatches * spec.num_layers
    product = 2 * spec.sequence_length * spec.hidden_size * spec.ffn_hidden_size
    assert saved == pytest.approx(product / float(SELENE.matmul_flops_per_s), rel=0.03)


def test_small_models_are_limited_by_host_launches():
    layout = plan(tensor_parallel=2, pipeline_parallel=1, data_parallel=1, global_batch_size=8)
    slow, fast = Coefficients(launch_s=5e-5), Coefficients(launch_s=1e-6)
    terms = seconds(layout, spec="demo", coefficients=slow).terms_s
    assert terms["host_launch"] > 0.5 * sum(terms.values())
    assert seconds(layout, spec="gpt-175b", coefficients=fast).terms_s["host_launch"] == 0


def test_tensor_parallelism_is_slower_across_nodes():
    inside, across = seconds(plan()), seconds(plan(tensor_parallel=16, pipeline_parallel=4))
    assert across.terms_s["tensor_parallel"] > 2 * inside.terms_s["tensor_parallel"]


def test_zero_3_traffic_grows_with_micro_batches():
    def extra(batch):
        base = plan(**ALONE, data_parallel=64, global_batch_size=batch)
        plans = [base.replace(zero_stage=stage) for stage in (1, 3)]
        one, three = seconds(*plans, spec="gpt-22b").terms_s["data_parallel"]
        return three - one

    assert extra(256) > 3 * extra(64) > 0


def test_shard_group_in_node_uses_node_links():
    """FSDP gathers weights inside a node. The gradients of a shard are summed across nodes."""
    spec = ModelSpec.preset("gpt-22b")
    base = plan(**ALONE, data_parallel=64, global_batch_size=256, zero_stage=3)
    layouts = Layouts.of(spec, [base.replace(shard_size=size) for size in (None, 8, 64)])
    links = GroupLinks(layouts, SELENE, PERFECT)
    across = links.data.rate[0]
    assert links.shard.rate.tolist() == [across, SELENE.node_bytes_per_s, across]
    shared = SELENE.network_bytes_per_s / 8
    assert links.copy.rate[1] == pytest.approx(shared), "eight devices share the node's ports"
    flat, inside, whole = step_time(layouts, SELENE, PERFECT).terms_s["data_parallel"]
    assert inside < 0.9 * flat and whole == flat

    # ZeRO 1 moves 6 bytes per weight across nodes, once per step. If the gradients of each shard
    # are summed across shard groups, 8 bytes cross nodes.
    once = base.replace(zero_stage=1, global_batch_size=64)
    layouts = Layouts.of(spec, [once, once.replace(shard_size=8)])
    flat, inside = step_time(layouts, SELENE, PERFECT).terms_s["data_parallel"]
    assert inside > flat


def test_uneven_pipeline_is_slower_than_mean_stage():
    spec = ModelSpec.preset("gpt-1.4b").replace(num_layers=26)
    layouts = Layouts.of(spec, [plan(tensor_parallel=1)])
    terms = step_time(layouts, SELENE, Coefficients()).terms_s
    assert terms["imbalance"] > 0.1 * terms["gemm"]


def test_one_call_equals_separate_calls():
    plans = [plan(), plan(recompute="full"), plan(tensor_parallel=4, pipeline_parallel=16)]
    together = seconds(*plans).total_s
    assert together == pytest.approx([float(seconds(each).total_s[0]) for each in plans])


def test_collective_times_follow_ring_formula():
    link = Link(1e9, 0.1)
    assert all_reduce_seconds(1e9, np.array([1.0, 2.0, 4.0]), link) == pytest.approx([0, 1.1, 1.6])
    assert all_gather_seconds(1e9, np.array(4.0), link) == pytest.approx(0.8)
    assert exposed_seconds(np.array([0.0, 3.0, 1e9]), 4.0) == pytest.approx(
        [0, 1, 1e9 - 4], rel=1e-6
    )


def test_group_links_never_exceed_hardware_rate():
    links = GroupLinks(published.layouts(published.load()[::11]), SELENE, PERFECT)
    for link in (links.tensor, links.data, links.pipeline):
        assert (link.rate <= SELENE.near_bytes_per_s).all()


def tensor_rates(hardware, coefficients=PERFECT):
    """Returns the bytes per second between tensor-parallel ranks, for groups of two, four and eight
    ranks.
    """
    plans = [plan(tensor_parallel=t, pipeline_parallel=1) for t in (2, 4, 8)]
    return GroupLinks(
        Layouts.of(ModelSpec.preset("gpt-22b"), plans), hardware, coefficients
    ).tensor.rate


def test_gcd_pairs_have_faster_links_than_node():
    rate = tensor_rates(Hardware.of(Site.load("frontier")))
    assert rate[:2] == pytest.approx([200e9, 75e9], rel=0.01)


def test_partial_group_loses_links_on_mesh_not_switch():
    mesh = tensor_rates(SELENE, dataclasses.replace(PERFECT, node_sharing=1.0))
    assert mesh == pytest.approx(SELENE.near_bytes_per_s * np.array([1 / 4, 1 / 2, 1]))
    assert tensor_rates(SELENE) == pytest.approx(SELENE.near_bytes_per_s, rel=0.02), "a switch"


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_outside_bounds_are_refused(name):
    low, high = BOUNDS[name]
    for value in (low / 2, high * 2):
        with pytest.raises(ConfigError, match=f"coefficients.{name}: .* Give"):
            Coefficients(**{name: value})


def test_hardware_names_missing_site_numbers():
    with pytest.raises(ConfigError, match=r"device\.peak_flops_per_s\.bf16.*kit bench"):
        Hardware.of(Site.load("laptop"))


def test_every_site_gives_plausible_hardware():
    sites = [site for site in map(Site.load, Site.names()) if site.device.memory_bytes_per_s]
    assert len(sites) >= 10
    for site in sites:
        hardware = Hardware.of(site)
        for name, value in vars(hardware).items():
            may_be_none = ("price_per_device_hour", "contention")
            assert value > 0 or name in may_be_none, (site.name, name)
        assert hardware.matmul_flops_per_s < hardware.peak_flops_per_s
        assert hardware.node_bytes_per_s < hardware.memory_bytes_per_s


def test_muon_products_have_flops_of_the_optimizer():
    """At perfect efficiency, the products of Muon take the time of their FLOPs at the peak rate,
    except for the few elements that the model adds to each dimension.
    """
    spec = ModelSpec.preset("llama3-8b")
    kv = spec.num_kv_heads * spec.head_size
    h, f = spec.hidden_size, spec.ffn_hidden_size
    shapes = [(h, h), (h, h), (kv, h), (kv, h), (f, h), (f, h), (h, f)]
    flops = sum(orthogonalisation_flops(*shape) for shape in shapes)
    times = seconds(plan(), spec="llama3-8b", coefficients=PERFECT, muon=True)
    layer_s, longest_s = times.orthogonalisation_s
    assert layer_s == pytest.approx(flops / SELENE.attention_flops_per_s, rel=0.01)
    longest = orthogonalisation_flops(f, h) / SELENE.attention_flops_per_s
    assert longest_s == pytest.approx(longest, rel=0.01)


def test_muon_is_shared_by_ranks_up_to_one_matrix_each():
    """More ranks take less time, until each rank has one matrix."""
    layouts = [
        Plan(data_parallel=n, zero_stage=3, global_batch_size=4096, precision="bf16")
        for n in (1, 8, 64, 4096)
    ]
    muon = seconds(*layouts, spec="llama3-8b", muon=True)
    adamw = seconds(*layouts, spec="llama3-8b")
    more = muon.optimizer_s - adamw.optimizer_s
    assert (np.diff(more) < 0).all()
    assert (more[3:] > muon.orthogonalisation_s[1][3:]).all()
    assert muon.terms_s["gemm"] == pytest.approx(adamw.terms_s["gemm"])
