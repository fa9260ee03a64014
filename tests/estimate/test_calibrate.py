"""Calibration of the planner: fits recover known coefficients, intervals cover measured runs, and
proposed runs narrow the intervals.
"""

import dataclasses
import json

import numpy as np
import pytest

from cluster.record import ConfigError
from cluster.site import Site
from cluster.slurm import inventory
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.choose.figures import coefficients_figure
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.calibrate import calibrate, propose, published_calibration
from kit.estimate.fit.fitting import Prior, fit, log_time_and_slopes
from kit.estimate.fit.measured_rows import hardware_on, published_rows
from kit.estimate.theory.hardware import NAMES, Coefficients, Hardware
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.step_time import step_time
from tests.support.pictures import check_figure
from tests.support.runs import new_run

TRUE = Coefficients().replace(
    gemm_efficiency=0.7, memory_efficiency=0.6, node_efficiency=0.6, factor=1.1
)


@pytest.fixture(scope="module")
def bloom():
    runs = published.load(system="Jean Zay")
    return [run for run in runs if run.kind == "measured" and "prequel" in run.source]


@pytest.fixture(scope="module")
def invented(bloom):
    """Returns the rows of published runs with invented step times. The planner's model computes
    them with the coefficients TRUE.
    """
    rows = published_rows(bloom)
    return dataclasses.replace(
        rows, step_time_s=step_time(rows.layouts, rows.hardware, TRUE).total_s
    )


def off(found, rows):
    """Returns the relative error of the fitted step time of each row."""
    times = fitting.log_time(rows.layouts, rows.hardware, found.values)
    return np.abs(np.exp(times) / rows.step_time_s - 1)


def test_fit_recovers_model_that_made_the_runs(invented):
    found = fit(invented, Prior.default())
    assert off(found, invented).max() < 0.01
    speed = found.coefficients.factor / found.coefficients.gemm_efficiency
    assert speed == pytest.approx(1.1 / 0.7, rel=0.06)


def test_fit_ignores_one_outlier_in_ten(invented):
    seconds = invented.step_time_s.copy()
    seconds[::10] *= 1.6
    found = fit(dataclasses.replace(invented, step_time_s=seconds), Prior.default())
    assert off(found, invented).mean() < 0.02


def test_fit_equals_prior_without_rows_and_keeps_bounds(bloom, invented):
    prior = Prior.default()
    nothing = fit(invented.select(np.zeros(len(invented), dtype=bool)), prior)
    assert np.array_equal(nothing.values, prior.mean)
    fast = dataclasses.replace(invented, step_time_s=invented.step_time_s / 4)
    values = fit(fast, prior).values
    assert (values >= fitting.LOW - 1e-9).all() and (values <= fitting.HIGH + 1e-9).all()
    found = fit(fast, prior).coefficients
    assert found.gemm_efficiency == pytest.approx(1) == found.factor, "no product above its ceiling"


def test_only_fixes_other_coefficients_at_prior_mean(invented):
    prior = Prior.default().only(["factor"])
    values = fit(invented, prior).values
    moved = np.abs(values - prior.mean) > 1e-3
    assert [name for name, each in zip(NAMES, moved, strict=True) if each] == ["factor"]


def test_stack_factors_recover_ratio_of_two_stacks(invented):
    stack = np.arange(len(invented)) % 2
    seconds = invented.step_time_s * np.where(stack == 1, 1.3, 1.0)
    rows = dataclasses.replace(invented, step_time_s=seconds, stack=stack)
    found = fit(rows, Prior.default(), stacks=True)
    assert np.exp(found.stack_factors[1] - found.stack_factors[0]) == pytest.approx(1.3, rel=0.05)


def test_log_time_and_slopes_match_model(invented):
    values = Prior.default().mean
    centre, slopes = log_time_and_slopes(invented.layouts, invented.hardware, values)
    assert slopes[:, NAMES.index("factor")] == pytest.approx(1)
    assert (slopes[:, NAMES.index("gemm_efficiency")] < 0).all()
    times = step_time(invented.layouts, invented.hardware, Coefficients())
    assert np.exp(centre) == pytest.approx(times.total_s)


def test_calibration_names_unidentified_coefficients(bloom):
    calibration = calibrate(bloom)
    assert calibration.num_runs == len(bloom) and calibration.error < 0.06
    assert "flash_efficiency" in calibration.unidentified, "none of these runs has fused attention"
    assert "factor" not in calibration.unidentified
    assert "not determined by the runs" in calibration._repr_html_()


def test_intervals_cover_runs_and_widen_without_runs(bloom):
    layouts, measured = published.layouts(bloom), published.measured_step_seconds(bloom)
    prediction = calibrate(bloom).predict(layouts)
    inside = (prediction.low_s < measured) & (measured < prediction.high_s)
    assert 0.85 <= inside.mean() < 1 and prediction.warnings == ()
    blind = calibrate([], Site.load("jean-zay")).predict(layouts)
    assert (blind.high_s / blind.low_s > 1.2 * prediction.high_s / prediction.low_s).all()
    assert "average of published machines" in blind.warnings[0]


def test_untried_traits_widen_interval_and_are_named():
    def width(**fields):
        plan = Plan.from_dict({"global_batch_size": 64, "data_parallel": 8} | fields)
        layouts = Layouts.of(ModelSpec.preset("llama3-8b"), [plan])
        found = calibrate([], Site.load("selene")).predict(layouts)
        return float((found.high_s / found.low_s).item()), found.unmeasured_features

    plain, nothing = width()
    compiled, one = width(compile=True)
    both, two = width(compile=True, zero_stage=3)
    _, few = width(pipeline_parallel=4, global_batch_size=16)
    assert plain < compiled < both and nothing == () and one == ("compiled blocks",)
    assert two == ("ZeRO 3 (FSDP2)", "compiled blocks")
    assert few == ("fewer micro-batches than stages",)
    hardware = Hardware.of(Site.load("selene"))
    layouts = published_rows(published.load(system="Selene")[:1]).layouts
    slow = dataclasses.replace(hardware, memory_bytes_per_s=hardware.memory_bytes_per_s / 4)
    assert interval.unmeasured_feature_counts(layouts, slow, None)[
        "device unlike those of the fit"
    ].all()
    measured = interval.MeasuredRange.of(layouts, slow)
    assert not untried(layouts, slow, measured), "its runs have told"


def untried(layouts, hardware, measured) -> set[str]:
    """Returns the names of the traits of a layout or device that occur neither in the runs of the
    fit nor in the measured range.
    """
    found = interval.unmeasured_feature_counts(layouts, hardware, measured)
    return {name for name, each in found.items() if each.any()}


def test_trait_of_measured_runs_is_not_untried(bloom):
    rows = published_rows(bloom[:6])
    rate = 2 * np.asarray(rows.hardware.matmul_flops_per_s)
    narrow = dataclasses.replace(rows.hardware, matmul_flops_per_s=rate)
    measured = interval.MeasuredRange.of(rows.layouts, narrow)
    assert measured.traits == {"number format below bf16"} <= untried(rows.layouts, narrow, None)
    assert not untried(rows.layouts, narrow, measured)


def test_misfit_of_runs_widens_next_interval(invented):
    noise = np.random.default_rng(0).normal(0, 0.3, len(invented))
    rough = dataclasses.replace(invented, step_time_s=invented.step_time_s * np.exp(noise))
    widths = []
    for rows in (invented, rough):
        found = fit(rows.select(np.arange(12)), Prior.default())
        widths.append(interval.SCALES.misfit_after(found.left_out_error, found.left_out_variance))
    assert widths[0] < interval.SCALES.misfit < 0.6 * widths[1]


def test_left_out_errors_match_refits(invented):
    """Left-out errors are computed without new fits. The test compares them with fits that leave
    out all runs of one model.
    """
    noise = np.random.default_rng(1).normal(0, 0.05, len(invented))
    rows = dataclasses.replace(invented, step_time_s=invented.step_time_s * np.exp(noise)).select(
        np.arange(0, 40, 2)
    )
    found, apart = fit(rows, Prior.default()), []
    shapes = np.stack([rows.layouts.num_layers, rows.layouts.hidden_size])
    for shape in np.unique(shapes, axis=1).T:
        is_one = np.all(shapes.T == shape, axis=1)
        others, one = fit(rows.select(~is_one), Prior.default()), rows.select(is_one)
        off = fitting.log_time(one.layouts, one.hardware, others.values) - np.log(one.step_time_s)
        apart.append(np.sqrt(np.mean(off**2)))
    assert len(apart) > 2 and len(rows) > 2 * len(apart)
    assert found.left_out_error == pytest.approx(np.array(apart), rel=0.4)


def test_quantiles_match_student_t():
    assert [interval.student_quantile(n) for n in (4, 5, 10, 1e6)] == pytest.approx(
        [2.132, 2.015, 1.812, 1.645], rel=2e-3
    )


def test_layout_outside_measured_range_is_warned(bloom):
    plan = Plan(tensor_parallel=2, global_batch_size=64)
    layouts = Layouts.of(ModelSpec.preset("gpt-22b"), [plan])
    warnings = calibrate(bloom).predict(layouts).warnings
    assert any("extrapolation" in each for each in warnings if each.startswith("parameters 22.1B"))


def test_proposed_runs_narrow_interval_more_than_random(bloom, invented):
    rows, prior = invented, Prior.default()
    chosen = calibrate([], Site.load("jean-zay")).propose(rows.layouts, 3)
    assert len(set(chosen)) == 3

    def doubt(picked):
        covariance = fit(rows.select(np.array(picked)), prior).covariance
        slopes = log_time_and_slopes(rows.layouts, rows.hardware, prior.mean)[1]
        return np.einsum("ij,jk,ik->", slopes, covariance, slopes)

    generator = np.random.default_rng(0)
    others = [doubt(generator.choice(len(bloom), 3, replace=False)) for _ in range(10)]
    assert doubt(chosen) < np.median(others)


def local_run(directory, plan, coefficients):
    """Writes a run directory whose step times come from the planner's model. Returns (run, seconds
    per step).
    """
    spec, site = ModelSpec.preset("demo"), Site.load("laptop")
    run = new_run(directory, spec=spec, plan=plan, recipe=Recipe(data="x", num_steps=8), site=site)
    plan.write(directory / "plan.attempt_01.json")
    layouts = Layouts.of(spec, [plan])
    times = step_time(layouts, hardware_on(site, layouts, "fp32"), coefficients)
    seconds = float(times.total_s[0])
    rows = [
        dict(step=i, attempt=1, step_time_s=seconds * (5 if i < 2 else 1), tokens=1, loss=1.0)
        for i in range(8)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run, seconds


def test_three_local_runs_predict_others_in_interval(tmp_path):
    true = Coefficients(launch_s=2e-5, gemm_efficiency=0.5, node_latency_s=1.5e-4, step_s=0.03)
    plans = [
        Plan(global_batch_size=8, micro_batch_size=4),
        Plan(data_parallel=2, global_batch_size=8),
        Plan(tensor_parallel=2, global_batch_size=8, micro_batch_size=2),
        Plan(tensor_parallel=2, data_parallel=2, global_batch_size=16),
        Plan(pipeline_parallel=2, global_batch_size=16),
        Plan(data_parallel=2, zero_stage=3, global_batch_size=16, micro_batch_size=2),
    ]
    made = [local_run(tmp_path / f"run-{i}", plan, true) for i, plan in enumerate(plans)]
    calibration = calibrate([run.directory for run, _ in made[:3]])
    assert calibration.num_runs == 3 and calibration.error < 0.1
    layouts = Layouts.of(ModelSpec.preset("demo"), plans[3:])
    prediction = calibration.predict(layouts, hardware_on(Site.load("laptop"), layouts, "fp32"))
    measured = np.array([seconds for _, seconds in made[3:]])
    assert ((prediction.low_s < measured) & (measured < prediction.high_s)).all()


def test_oversubscribed_cores_halve_compute_rate():
    site = Site.load("laptop").replace(devices_per_node=2)
    plans = [Plan(), Plan(data_parallel=4, global_batch_size=4)]
    layouts = Layouts.of(ModelSpec.preset("demo"), plans)
    rate = hardware_on(site, layouts, "fp32").matmul_flops_per_s
    assert rate[0] == 2 * rate[1]


def test_fp16_rate_equals_bf16_rate():
    """The planner is fitted with the bf16 FLOP/s for runs in fp16, so every view of an fp16 run
    must use the bf16 FLOP/s too.
    """
    site = Site.load("frontier")
    layouts = Layouts.of(ModelSpec.preset("demo"), [Plan()])
    rates = [hardware_on(site, layouts, dtype).matmul_flops_per_s for dtype in ("fp16", "bf16")]
    assert rates[0] == rates[1] == Hardware.of(site).matmul_flops_per_s


def test_calibration_refuses_unusable_runs(tmp_path, bloom):
    run, _ = local_run(tmp_path / "run", Plan(), Coefficients())
    (run.directory / "metrics.jsonl").write_text("")
    unknown = dict(system="x", source="x", device="chip", peak_flops_per_s=None)
    nowhere, rows = dataclasses.replace(bloom[0], **unknown), published_rows(bloom[:2])
    asked = rows.layouts, rows.hardware, Prior.default().mean, np.eye(len(NAMES))
    for message, action in (
        ("no step time yet", lambda: calibrate([run])),
        ("of laptop, and frontier has", lambda: calibrate([run], Site.load("frontier"))),
        ("neither runs nor a site", lambda: calibrate([])),
        ("no site file and no peak", lambda: published_rows([nowhere])),
        ("3 of 2 candidates", lambda: propose(*asked, 3)),
    ):
        with pytest.raises(ConfigError, match=message):
            action()
    guessed = published_rows([dataclasses.replace(nowhere, peak_flops_per_s=312e12)]).hardware
    assert guessed.memory_bytes_per_s[0] == Hardware.like(312e12).memory_bytes_per_s


@pytest.mark.parametrize("name", ["dgx-h100", "kaist", "tpu-v4"])
def test_fitted_rates_stay_below_measured_ceilings(name):
    found = published_calibration(Site.load(name)).coefficients.to_dict()
    rates = [value for key, value in found.items() if key.endswith("efficiency")]
    assert len(rates) == 7 and max(rates) <= found["factor"]


def test_site_with_base_keeps_calibration_of_same_device(tmp_path):
    def laid_over(lines, name='name = "mine"'):
        file = tmp_path / "mine.toml"
        file.write_text(f'base = "dgx-h100"\n{name}\n{lines}')
        return Site.load(file)

    packaged = published_calibration(Site.load("dgx-h100"))
    mine = published_calibration(laid_over(""))
    assert mine.coefficients == packaged.coefficients
    assert str(mine) == "calibrated on 20 runs of dgx-h100, mean error of the fit 4.4%"
    assert str(packaged) == "calibrated on 20 runs, mean error of the fit 4.4%"
    ports = '[links]\ninter_node_bytes_per_s = { value = 1e11, source = "four ports only" }'
    for name in ('name = "mine"', 'name = "frontier"', ""):
        slow = published_calibration(laid_over(ports, name))
        assert slow.coefficients == packaged.coefficients, "fitted with the links of the runs"
        assert slow.hardware.network_bytes_per_s == packaged.hardware.network_bytes_per_s / 4
    other = published_calibration(laid_over('[device]\nname = "another accelerator"'))
    assert other.num_runs == 0 and str(other).startswith("not calibrated")
    assert published_calibration(Site.load("eks-trn1")).num_runs == 11


def test_site_without_runs_uses_runs_of_the_same_device(tmp_path):
    """`kit site init` writes a site file with the device of a packaged site and without a base."""
    text = inventory.site_text(
        inventory.parse_node_types("gpu*|16|96|2000000|30:00|1|gpu:h100:8")[0],
        {"ClusterName": "mine"},
    )
    (tmp_path / "mine.toml").write_text(text)
    mine = Site.load(tmp_path / "mine.toml")
    mine = mine.replace(links=Site.load("dgx-h100").links)
    assert mine.base is None
    packaged = published_calibration(Site.load("dgx-h100"))
    found = published_calibration(mine)
    assert found.coefficients == packaged.coefficients
    assert found.label == "calibrated on 20 runs of dgx-h100" and "of" not in packaged.label
    # Several packaged sites have this device and published runs.
    a100 = mine.replace(device=Site.load("selene").device)
    assert published_calibration(a100).label == "calibrated on 1,049 runs of kaist"
    unknown = mine.replace(device=mine.device.replace(name="another GPU"))
    assert published_calibration(unknown).label == "not calibrated"


def test_published_calibration_covers_its_own_runs():
    runs = [run for run in published.load(system="Frontier") if run.status in ("read", "mixed")]
    runs = [run for run in runs if run.kind == "measured"]
    prediction = published_calibration(Site.load("frontier")).predict(published.layouts(runs))
    measured = published.measured_step_seconds(runs)
    assert np.mean((prediction.low_s < measured) & (measured < prediction.high_s)) >= 0.85


def test_published_calibration_widens_for_other_stack():
    site, runs = Site.load("dgx-h100"), published.of_site("dgx-h100")
    ours, theirs = calibrate(runs, site), published_calibration(site)
    # The stored fit was computed on another machine, whose processor rounds differently.
    fitted = dataclasses.asdict(ours.coefficients)
    assert fitted == pytest.approx(dataclasses.asdict(theirs.coefficients), rel=1e-6)
    assert theirs.misfit**2 == pytest.approx(ours.misfit**2 + interval.OTHER_STACK**2)


def test_published_runs_calibrate_only_their_site():
    frontier, h100 = (published_calibration(Site.load(name)) for name in ("frontier", "dgx-h100"))
    assert frontier.num_runs == 18 and frontier.error < 0.15
    assert h100.num_runs == 20, "of Megatron 9 in bf16 and 7 in fp8, of OLMo-core 4"
    aurora = published_calibration(Site.load("aurora"))
    assert aurora.num_runs == 0
    assert aurora.coefficients.to_dict() == pytest.approx(Coefficients().to_dict())


def test_coefficients_figure_has_quantiles_of_prior_and_posterior(bloom):
    """The intervals of the table are compared with quantiles of random draws, which are cut off at
    the bounds of the coefficients.
    """
    found = calibrate(bloom)
    figure, rows = coefficients_figure(found)
    check_figure(figure)
    assert sorted(row["coefficient"] for row in rows) == sorted(NAMES)
    generator = np.random.default_rng(0)
    for mean, deviation, low, high in (
        (found.prior.mean, found.prior.spread, "prior_low", "prior_high"),
        (found._values, np.sqrt(np.diag(found.covariance)), "low", "high"),
    ):
        draws = generator.normal(mean, deviation, (20_000, len(NAMES)))
        draws = np.exp(np.clip(draws, fitting.LOW, fitting.HIGH))
        for row in rows:
            column = draws[:, NAMES.index(row["coefficient"])]
            ends = np.quantile(column, [0.05, 0.95])
            assert [row[low], row[high]] == pytest.approx(ends, rel=0.05)
    widths = [row["narrowed_to"] for row in rows]
    assert widths == sorted(widths) and widths[0] < 0.9, "the runs narrow some intervals"
    for row in rows:
        assert (row["narrowed_to"] >= 0.9) == (row["coefficient"] in found.unidentified)


def test_prior_is_the_posterior_without_runs():
    """Without runs, the figure has equal intervals of prior and posterior."""
    _, rows = coefficients_figure(calibrate([], Site.load("frontier")))
    for row in rows:
        assert row["narrowed_to"] == pytest.approx(1) and row["value"] == pytest.approx(
            row["prior"]
        )
        assert (row["low"], row["high"]) == pytest.approx((row["prior_low"], row["prior_high"]))


def test_calibration_does_not_depend_on_format_of_first_run() -> None:
    """With the rates of fp8, the step of a run in bf16 would be predicted a quarter too short."""
    runs = published.of_site("dgx-h100")
    fp8 = next(run for run in runs if run.precision == "fp8")
    bf16 = next(run for run in runs if run.spec.name == "Llama-3-8B")
    site = Site.load("dgx-h100")
    layouts = bf16.layouts()
    first, last = (calibrate(each, site).predict(layouts) for each in ([fp8, bf16], [bf16, fp8]))
    assert first.total_s.item() == pytest.approx(last.total_s.item(), rel=1e-3)
    hardware = calibrate([fp8]).hardware
    assert hardware.matmul_flops_per_s == Hardware.of(site).matmul_flops_per_s
