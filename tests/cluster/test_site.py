"""Site files, which describe machines: the packaged files, sources of their numbers, and errors for
invalid files.
"""

import os

import pytest

from cluster.record import ConfigError
from cluster.render import check_submittable
from cluster.scheduler import Slurm
from cluster.site import Fact, Site

SMALL = """
name = "small"
description = "two devices"
scheduler = "slurm"
devices_per_node = 2
[device]
name = "chip"
[device.peak_flops_per_s]
bf16 = { value = 1e14, source = "sheet", error = 0 }
"""


def every_fact(value):
    if isinstance(value, dict) and {"value", "source"} <= set(value):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from every_fact(item)


@pytest.mark.parametrize("name", Site.names())
def test_packaged_site_round_trips_and_names_sources(name):
    site = Site.load(name)
    assert site.name == name and Site.from_json(site.to_json()) == site
    assert all(len(fact["source"]) >= 6 for fact in every_fact(site.to_dict()))
    assert site.device.name in site._repr_html_()


def test_frontier_node_is_four_cards_of_383_teraflops():
    site = Site.load("frontier")
    peak = site.peak_flops_per_s("bf16")
    assert peak is not None and peak * site.devices_per_node == pytest.approx(4 * 383e12)
    assert peak == site.peak_flops_per_s("fp16")
    assert site.device.matmul_flops_per_s["bf16"].value < peak
    assert [link.num_devices for link in site.links.intra_node] == [2, 8]


def test_trainium_instance_matches_its_data_sheet():
    site = Site.load("trn1.32xlarge")
    device, devices = site.device, site.devices_per_node
    assert device.peak_flops_per_s["bf16"].value * devices == pytest.approx(3040e12)
    assert device.memory_bytes and device.memory_bytes.value * devices == 512 * 2**30
    bandwidth = device.memory_bytes_per_s
    assert bandwidth and bandwidth.value * devices == pytest.approx(13120 * 2**30)
    assert site.price_per_node_hour and site.price_per_node_hour.value == 21.5


def test_laptop_peak_is_unknown_until_measured():
    site = Site.load("laptop")
    assert site.devices_per_node == os.cpu_count()
    assert site.device.memory_bytes and "this machine" in site.device.memory_bytes.source
    measured = site.with_measured_peak("fp32", 1.4e11, "matmul 1024^3, 1 thread")
    assert measured.device.peak_flops_per_s["fp32"] == Fact(
        value=1.4e11, source="matmul 1024^3, 1 thread"
    )
    assert site.peak_flops_per_s("fp32") is None, "the site itself must not change"
    assert measured.peak_flops_per_s("bf16") is None, "a measured fp32 peak says nothing about bf16"


def small(old, new):
    return SMALL.replace(old, new)


def slurm_line(line):
    """Returns the text of a site file with one line in its [slurm] table."""
    return f'base = "selene"\n[slurm]\n{line}\n'


PEAK = r"site\.device\.peak_flops_per_s\.bf16"
IMPOSSIBLE = [small("1e14", value) for value in "0 -1e12 inf nan 2e17 true".split()]
IMPOSSIBLE.append(small("1e14", '"1e12"'))
DAMAGED = ["name = ", "\x00", 'name = "small"', SMALL + "[links]\nx=1"]
REFUSED = [
    *((text, PEAK) for text in IMPOSSIBLE),
    *((small("error = 0", f"error = {e}"), rf"{PEAK}\.error: .*5 % is 0.05") for e in (-0.1, 5)),
    (small("error = 0", "error = nan"), rf"{PEAK}\.error: .*5 % is 0.05"),
    *((text, "") for text in DAMAGED),
    *(
        (f"base = {base}", "site.base.*Allowed: .*frontier")
        for base in ('"fronteir"', '"x.toml"', 3)
    ),
    (small("devices_per", "device_per"), "Did you mean 'devices_per_node'"),
    (small("bf16", "bf_16"), "Did you mean 'bf16'"),
    (slurm_line('acount = "x"'), r"site\.slurm\.acount: unknown key. Did you mean 'account'"),
    (slurm_line('reservation = "r1"'), r'sbatch_options = \["--reservation=r1"\]'),
    (slurm_line("exclusive = true"), r'sbatch_options = \["--exclusive"\]'),
    (slurm_line('time = "1:00:00"'), "kit launch --time"),
    (slurm_line('account = "a b"'), r"slurm\.account: 'a b' is not allowed"),
    (slurm_line('partition = "x\\n#SBATCH --hold"'), r"slurm\.partition"),
    (slurm_line('sbatch_options = ["--mem=0 --hold"]'), r"sbatch_options: '--mem=0 --hold'"),
    (slurm_line('sbatch_options = ["--output=/x"]'), "sbatch_options: '--output=.*sets it itself"),
    (slurm_line('sbatch_options = ["--outp=/x"]'), "sbatch_options: '--outp=.*the kit sets it"),
    (slurm_line('sbatch_options = ["-oprofile"]'), "sbatch_options: '-oprofile' .*not written out"),
    (slurm_line('sbatch_options = ["--wrap=id"]'), r"slurm\.sbatch_options: '--wrap=id'"),
    (slurm_line('srun_options = ["; rm"]'), r"slurm\.srun_options"),
    (slurm_line('modules = ["rocm; rm"]'), r"slurm\.modules"),
    (slurm_line("cpus_per_task = 0"), r"slurm\.cpus_per_task: 0 is not allowed"),
    (slurm_line('launcher = "mpirun"'), r"slurm\.launcher: 'mpirun'.*Allowed: 'srun', 'torchrun'"),
    (slurm_line('environment = {"A-B" = "1"}'), r"environment: 'A-B' cannot be exported"),
    (slurm_line('environment = {WANDB_API_KEY = "1"}'), r"\.WANDB_API_KEY: looks like a secret"),
    (slurm_line('broadcast = {directory = "/mnt/$HOME/x"}'), r"directory.*it may name \$USER"),
    (slurm_line('broadcast = {directory = "disk"}'), r"broadcast\.directory.*absolute"),
    (
        slurm_line("walltime = [{max_nodes = 9, max_hours = 2}, {max_nodes = 9, max_hours = 4}]"),
        "must rise from bin to bin",
    ),
    (slurm_line("walltime = [{max_hours = 0}]"), "walltime"),
    (
        'base = "laptop"\n[slurm]\npartition = "gpu"\n',
        r"'local', of the base 'laptop', .*\[slurm\]. Add the line scheduler = \"slurm\"",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_invalid_site_file_error_names_the_field(tmp_path, text, message):
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"my.toml: .*{message}"):
        Site.load(tmp_path / "my.toml")


def test_all_missing_fields_are_named_in_one_error(tmp_path):
    text = SMALL.replace('name = "small"', "").replace('description = "two', '# "two')
    text = text.replace('name = "chip"', "").replace(', source = "sheet"', "")
    text = text.replace("[device]\n", "[device]\nmemory_bytes = 80e9\n")
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        Site.load(tmp_path / "my.toml")
    named, told = str(raised.value).removeprefix("my.toml: ").split(": missing. ")
    wanted = "site.name site.description site.device.name site.device.peak_flops_per_s.bf16.source"
    wanted += " site.device.memory_bytes.source"
    assert sorted(named.split(", ")) == sorted(wanted.split()) and told.startswith("Add a value")
    example = told.partition("as in ")[2].removesuffix(".")
    filled = SMALL.replace("[device]\n", f"[device]\n{example}\n")
    (tmp_path / "my.toml").write_text(filled)
    assert Site.load(tmp_path / "my.toml").device.memory_bytes.value == 80 * 2**30


def test_site_file_completes_its_base_for_submission(tmp_path):
    (tmp_path / "my.toml").write_text(
        'base = "frontier"\n[slurm]\naccount = "abc123"\n[slurm.environment]\nNCCL_DEBUG = "WARN"\n'
    )
    mine = Site.load(tmp_path / "my.toml")
    check_submittable(mine)
    assert mine.slurm and mine.slurm.partition == "batch", "the rest comes from the base"
    assert mine.slurm.environment == {"FI_CXI_RDZV_PROTO": "alt_read", "NCCL_DEBUG": "WARN"}
    assert mine.device == Site.load("frontier").device


def test_largest_job_is_limited_by_partition_and_bins():
    slurm = Slurm.from_dict({"max_nodes": 100, "walltime": [{"max_nodes": 64, "max_hours": 1}]})
    assert slurm.largest_job == 64 and slurm.max_seconds(65) is None
    assert Slurm(max_nodes=100).largest_job == 100 and Slurm().largest_job is None
