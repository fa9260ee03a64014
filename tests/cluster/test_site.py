"""Site files: what ships loads, numbers carry their source, and nonsense is refused with a
readable message.
"""

import os

import pytest

from cluster.record import ConfigError
from cluster.site import Fact, Site

SMALL = """
name = "small"
description = "two devices"
scheduler = "slurm"
devices_per_node = 2
[device]
name = "chip"
[device.peak_flops_per_s]
bf16 = {{ value = {value}, source = "sheet", error = {error} }}
"""


def write_site(directory, text):
    file = directory / "small.toml"
    file.write_text(text)
    return file


def every_fact(value):
    if isinstance(value, dict):
        if {"value", "source"} <= set(value):
            yield value
        else:
            for item in value.values():
                yield from every_fact(item)
    elif isinstance(value, list):
        for item in value:
            yield from every_fact(item)


@pytest.mark.parametrize("name", ["laptop", "frontier", "trn1.32xlarge"])
def test_packaged_site_round_trips_and_every_number_has_a_source(name):
    site = Site.load(name)
    assert site.name == name and name in Site.names()
    assert Site.from_json(site.to_json()) == site
    assert all(len(fact["source"]) > 10 for fact in every_fact(site.to_dict()))
    assert site.device.name in site._repr_html_()


def test_frontier_node_is_four_cards_of_383_teraflops():
    site = Site.load("frontier")
    peak = site.peak_flops_per_s("bf16")
    assert peak is not None and peak * site.devices_per_node == pytest.approx(4 * 383e12)
    assert peak == site.peak_flops_per_s("fp16")
    assert site.device.matmul_flops_per_s["bf16"].value < peak
    assert [link.num_devices for link in site.links.intra_node] == [2, 8]


def test_trainium_instance_adds_up_to_its_data_sheet():
    site = Site.load("trn1.32xlarge")
    peak, memory = site.peak_flops_per_s("bf16"), site.device.memory_bytes
    assert peak is not None and peak * site.devices_per_node == pytest.approx(3040e12)
    assert memory is not None and memory.value * site.devices_per_node == 512 * 2**30
    bandwidth = site.device.memory_bytes_per_s
    assert bandwidth is not None and bandwidth.value * site.devices_per_node == pytest.approx(
        13120 * 2**30
    )
    assert site.price_per_node_hour is not None and site.price_per_node_hour.value == 21.5


def test_laptop_is_this_machine_and_its_peak_is_unknown_until_measured():
    site = Site.load("laptop")
    assert site.devices_per_node == os.cpu_count()
    assert (
        site.device.memory_bytes is not None and "this machine" in site.device.memory_bytes.source
    )
    assert site.peak_flops_per_s("fp32") is None
    measured = site.with_measured_peak("fp32", 1.4e11, "matmul 1024^3, 1 thread")
    assert measured.peak_flops_per_s("fp32") == 1.4e11
    assert measured.device.peak_flops_per_s["fp32"].source == "matmul 1024^3, 1 thread"
    assert site.peak_flops_per_s("fp32") is None, "the site itself must not change"
    assert measured.peak_flops_per_s("bf16") is None, "a measured fp32 peak says nothing about bf16"


PEAK = r"small\.toml: site\.device\.peak_flops_per_s\.bf16"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        *((value, 0.1, PEAK) for value in ("0", "-1e12", "inf", "nan", "2e17", "true", '"1e12"')),
        *(("1e14", error, rf"{PEAK}\.error: .*5 % is 0.05") for error in ("-0.1", "5", "nan")),
    ],
)
def test_impossible_number_is_refused_and_located(tmp_path, value, error, message):
    with pytest.raises(ConfigError, match=message):
        Site.load(write_site(tmp_path, SMALL.format(value=value, error=error)))


@pytest.mark.parametrize("name", ["NVIDIA B200", "AMD Instinct MI300X", "Trainium2 NeuronCore"])
def test_a_peak_in_teraflops_is_refused_with_what_is_meant(name):
    device = Site.load("frontier").device
    for field in ("peak_flops_per_s", "matmul_flops_per_s"):
        with pytest.raises(ConfigError, match=rf"{field}\.bf16: 2250 .* are 2.25e\+15"):
            device.replace(name=name, **{field: {"bf16": Fact(value=2250, source="a slip")}})
    with pytest.raises(ConfigError, match="Give FLOP/s, not TFLOP/s"):
        Site.load("laptop").with_measured_peak("fp32", 0.14, "a slip")


def test_impossible_measured_peak_and_a_fact_without_a_source_are_refused():
    for value in (0.0, -1.0, float("nan"), 1e18):
        with pytest.raises(ConfigError):
            Site.load("laptop").with_measured_peak("fp32", value, "a broken clock")
    with pytest.raises(ConfigError, match="source"):
        Fact(value=1.0, source=" ")


@pytest.mark.parametrize("name", ["frontir", "../sites/frontier", "", "nowhere.toml", "/"])
def test_unknown_site_says_what_there_is(name):
    with pytest.raises(ConfigError, match="frontier"):
        Site.load(name)


def test_misspelt_name_key_and_dtype_get_a_suggestion(tmp_path):
    def loaded(right, wrong):
        text = SMALL.replace(right, wrong).format(value="1e14", error=0)
        return Site.load(write_site(tmp_path, text))

    for meant, load in {
        "frontier": lambda: Site.load("fronteir"),
        "devices_per_node": lambda: loaded("devices_per", "device_per"),
        "bf16": lambda: loaded("bf16", "bf_16"),
    }.items():
        with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
            load()
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        Site.load("frontier").peak_flops_per_s("bf61")


@pytest.mark.parametrize(
    "text", ["name = ", "\x00", 'name = "small"', SMALL.format(value=1, error=0) + "[links]\nx=1"]
)
def test_damaged_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="small.toml"):
        Site.load(write_site(tmp_path, text))


def test_all_fields_that_are_missing_are_named_at_once(tmp_path):
    text = (
        SMALL.format(value="1e12", error="0.1")
        .replace('name = "small"', "")
        .replace('description = "two', '# "two')
    )
    for left_out in ('name = "chip"', ', source = "sheet"'):
        text = text.replace(left_out, "")
    with pytest.raises(ConfigError) as raised:
        Site.load(str(write_site(tmp_path, text)))
    wanted = [
        "site.name",
        "site.description",
        "site.device.name",
        "site.device.peak_flops_per_s.bf16.source",
    ]
    named, told = str(raised.value).removeprefix("small.toml: ").split(": missing. ")
    assert (
        sorted(named.split(", ")) == sorted(wanted) and told == "Add a value; there is no default."
    )
