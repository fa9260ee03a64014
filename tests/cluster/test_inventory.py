"""A first site file from what a cluster says: recorded resources of other clusters, and the real Slurm here."""

import os
import shlex

import pytest
from typer.testing import CliRunner

from cluster import devices
from cluster.login import mirror, submit
from cluster.record import ConfigError
from cluster.render import check_submittable
from cluster.site import Fact, Site
from cluster.slurm import inventory
from cluster.state import JobError
from kit.commands import sites
from kit.commands.app import app

CONFIG = """\
Configuration data as of 2026-11-23T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = big gpu
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldParameters     = enable_configless
"""


# Written as in: molbuilder's and nodetop's tests of scontrol (A100), JHU's DSAI pages (H100), LUMI's documentation
# (mi250), a public note with `gpu:A100:4(S:0-1),lscratch:3570`, slurm_usage_history's tests (two kinds on a node).
@pytest.mark.parametrize(("gres", "expected"), [
    ("gpu:a100:4(S:0-1)", (4, "a100")),
    ("gpu:A100:4(S:0-1),lscratch:3570", (4, "A100")),
    ("gpu:a100:2,gpu:v100:2", (2, "a100")),
    ("gpu:a100:1,gpu:a100_1g.5gb:7", (1, "a100")),
    ("gpu:mi250:8(S:0-3,5)", (8, "mi250")),
    ("gpu:h200:8(S:0-1)", (8, "h200")),
    ("gres/gpu:4", (4, "")),
    ("gpu:a100_3g.20gb:2(S:0)", (2, "a100_3g.20gb")),
    ("gpu:tesla", (1, "tesla")),
    ("shard:16,nvme:1", (0, "")),
    ("(null)", (0, "")),
])  # fmt: skip
def test_generic_resources(gres, expected):
    assert inventory.gpus_of(gres) == expected


@pytest.mark.parametrize(("limit", "expected"), [
    ("2-00:00:00", 48), ("1-12", 36), ("12:00:00", 12), ("30:00", 0.5), ("90", 0.025), ("infinite", None),
    ("UNLIMITED", None), ("n/a", None), ("3-01:30", 73.5),
])  # fmt: skip
def test_time_limits(limit, expected):
    assert inventory.hours(limit) == expected


LINES = """\
cpu*|1024|128|257000|infinite|1-infinite|(null)
gpu|80|128|515000|2-00:00:00|1-64|gpu:a100:4(S:0-1)
gpu|11|112+|2063K|2-00:00:00|1-64|gpu:h100:8(S:0-1)
debug|2|64|257000|30:00|1|gpu:4
"""


def write(tmp_path, partition=None, lines=LINES, **more):
    nodes = inventory.choose(inventory.nodes_of(lines), partition)
    file = tmp_path / "site.toml"
    file.write_text(inventory.site_text(nodes, inventory.settings_of(CONFIG), **more))
    return Site.load(str(file)), file.read_text()


def seen(name, mebibytes):
    return devices.Gpus(name, mebibytes * 2**20, 1, "nvidia-smi")


def test_nodes_with_gpus_come_first_and_what_differs_is_left_open(tmp_path):
    site, text = write(tmp_path)
    assert (site.name, site.devices_per_node, site.slurm.partition) == ("big-gpu", 4, "gpu")
    assert site.device.name.startswith("NVIDIA A100") and site.peak_flops_per_s("bf16") == 312e12
    assert site.device.memory_bytes is None and "EDIT: memory_bytes" in text, "40 or 80 GB: GRES does not say"
    assert (site.slurm.gpus_per_node, site.slurm.cpus_per_task) == ("a100:4", 32)
    assert site.slurm.account == "EDIT" and site.slurm.sbatch_options == ("--mem=0",)
    assert site.slurm.max_nodes == 64 and site.slurm.max_seconds(64) == 48 * 3600
    with pytest.raises(ConfigError, match="slurm.account"):
        check_submittable(site)


def test_what_a_node_was_asked_decides(tmp_path):
    forty, _ = write(tmp_path, seen=seen("NVIDIA A100-SXM4-40GB", 40960))
    eighty, _ = write(tmp_path, seen=seen("NVIDIA A100-SXM4-80GB", 81920))
    assert forty.device.memory_bytes.value == 40 * 2**30 and eighty.device.memory_bytes.value == 80 * 2**30
    other, text = write(tmp_path, seen=seen("NVIDIA L40S", 46068))
    assert other.device.is_gpu and not other.device.peak_flops_per_s and "EDIT: [device.peak_flops_per_s]" in text
    odd, text = write(tmp_path, seen=seen("NVIDIA H100 NVL", 95830))
    assert odd.device.name == "NVIDIA H100 NVL" and not odd.device.peak_flops_per_s, "it is no SXM"
    other, _ = write(tmp_path, seen=seen("NVIDIA H100 80GB HBM3", 95830))
    assert other.device.memory_bytes == Fact(value=95830 * 2**20, source="nvidia-smi"), "not the site's"
    assert other.device.memory_bytes_per_s is None


# Printed by rocm-smi: TorchServe's ROCmUtilTest (MI250), marimo's issue 9237 (Radeon). amd-smi's is only as others'
# tests have it, as a list and below gpu_data; its names and units stand in ROCm/rocm-systems' pull request 2987.
MI250 = """{"card0": {"Card Series": "AMD INSTINCT MI250 (MCM) OAM AC MBA", "Card Model": "0x740c", "Card Vendor":
 "Advanced Micro Devices, Inc. [AMD/ATI]", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)":
 "51527024640"}, "card1": {"Card series": "AMD INSTINCT MI250 (MCM) OAM AC MBA", "VRAM Total Memory (B)":
 "68702699520"}, "system": {"Driver version": "6.7.0"}}""".replace("\n", "")
RADEON = """WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card0": {"GPU use (%)": "0", "VRAM Total Memory (B)": "21458059264", "Card Series": "Radeon RX 7900 XT"}}"""
MI300X = """[{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}, "vram": {"type": "HBM3",
 "size": {"value": 196592, "unit": "MB"}}}]"""


@pytest.mark.parametrize(("text", "expected"), [
    ("NVIDIA A100-SXM4-80GB, 81920\nNVIDIA A100-SXM4-80GB, 81920\n", ("NVIDIA A100-SXM4-80GB", 81920 * 2**20, 2)),
    (MI250, ("AMD INSTINCT MI250 (MCM) OAM AC MBA", 68702699520, 2)),
    (RADEON, ("Radeon RX 7900 XT", 21458059264, 1)),
    (MI300X, ("AMD Instinct MI300X", 196592 * 2**20, 1)),
    (f'{{"gpu_data": {MI300X}}}', ("AMD Instinct MI300X", 196592 * 2**20, 1)),
    ("srun: error: nothing", None), ("", None), ("{torn", None), ('{"card0": {}}', None), ("[]", None), ("[1]", None),
])  # fmt: skip
def test_what_the_vendors_tools_print(text, expected, tmp_path):
    found = devices.gpus_of(text)
    assert (found and found[:3]) == expected
    if found:
        file = tmp_path / "site.toml"
        file.write_text(devices.local_text(found, "desk"))
        site = Site.load(str(file))
        assert site.scheduler == "local" and site.device.is_gpu and site.devices_per_node == found.count
        assert site.device.memory_bytes and site.device.memory_bytes.value == pytest.approx(
            found.memory_bytes, rel=0.01
        )
        assert bool(site.device.peak_flops_per_s) == ("A100" in found.name), "an air-cooled MI250 is no MI250X"


def test_a_file_of_this_machine(tmp_path):
    file = tmp_path / "desk.toml"
    done = CliRunner().invoke(app, ["site", "init", str(file), "--local"])
    assert done.exit_code == 0, (done.output, done.exception)
    site = Site.load(str(file))
    assert site.scheduler == "local" and site.devices_per_node >= 1 and "kit launch runs/first --site" in done.output
    wrong = CliRunner().invoke(app, ["site", "init", str(tmp_path / "b.toml"), "--local", "--account", "x"])
    assert "--account: not with --local" in str(wrong.exception) and not (tmp_path / "b.toml").exists()


def test_a_probe_is_charged_to_the_account_and_the_file_names_it(tmp_path):
    asked = []
    nodes = inventory.choose(inventory.nodes_of(LINES), None)
    found = inventory.probe(lambda words: asked.append(words) or MI300X, nodes, "abc123")
    assert found and found.tool == "amd-smi" and "--account=abc123" in asked[0] and asked[0][0] == "srun"
    site, text = write(tmp_path, seen=found, account="abc123")
    assert site.slurm.account == "abc123" and 'account = "EDIT"' not in text


@pytest.mark.parametrize("gres", ["gpu:a100_3g.20gb:2(S:0)", "gpu:h100_pcie:4", "gpu:h100_nvl:4", "gpu:mi300x:8"])
def test_a_slice_or_another_model_has_no_facts_of_its_namesake(gres, tmp_path):
    site, text = write(tmp_path, lines=f"gpu*|2|64|257000|30:00|1|{gres}\n")
    assert site.device.is_gpu and site.device.memory_bytes is None and site.device.watts is None
    assert not site.device.peak_flops_per_s and "EDIT: [device.peak_flops_per_s]" in text


def test_other_partitions(tmp_path):
    site, _ = write(tmp_path, "debug")
    assert site.devices_per_node == 4 and site.device.is_gpu and site.slurm.gpus_per_node == "4"
    assert site.slurm.max_seconds(1) == 1800 and site.slurm.max_nodes == 1
    site, _ = write(tmp_path, "cpu")
    assert site.devices_per_node == 128 and not site.device.is_gpu and site.slurm.max_seconds(9) is None
    site, text = write(tmp_path, login="frontier")
    assert site.login == "frontier" and site.there is not None and site.there.sync and "/EDIT/bin/python" in text
    with pytest.raises(ConfigError, match="--partition: 'gpuu' is unknown. Did you mean 'gpu'"):
        write(tmp_path, "gpuu")
    with pytest.raises(JobError, match="is not of the form"):
        inventory.nodes_of("PARTITION AVAIL TIMELIMIT")


@pytest.fixture
def login_node(monkeypatch):
    """A cluster behind ssh whose commands answer at once; returns what it was asked, and refuses all else."""
    asked = []
    answers = {"sinfo": LINES, "scontrol": CONFIG, "srun": "\n"}

    def ssh(login, command, data=b"", timeout_s=0.0):
        asked.append(shlex.split(shlex.split(command)[-1]))
        if asked[-1][0] not in answers:
            raise JobError(f"{login}: exit code 127: bash: line 1: {asked[-1][0]}: No such file or directory")
        return answers[asked[-1][0]].encode()

    for place in (sites, submit, mirror):
        monkeypatch.setattr(place, "ssh", ssh)
    return asked


def test_what_is_advised_after_a_first_file_needs_no_connection(login_node, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app(["site", "init", "my.toml", "--login", "frontier"], standalone_mode=False)
    said = capsys.readouterr().out.splitlines()
    marked = [(n, line) for n, line in enumerate((tmp_path / "my.toml").read_text().splitlines(), 1) if "EDIT:" in line]
    assert said[2:] == [f"  my.toml, line {n}: {line}" for n, line in marked]
    assert marked[0][0] > 1 and any("# EDIT: [links]" in line for line in said), "the heading is nothing to edit"
    asked = len(login_node)
    advised = shlex.split(said[1].split("kit ")[1])
    assert advised == ["launch", "runs/first", "--site", "my.toml", "--show"]
    app(advised, standalone_mode=False)
    left = "site.there.python: in my.toml", "site.there.folder: in my.toml", "site.slurm.account: in my.toml"
    assert [line.strip() for line in capsys.readouterr().err.splitlines()][1:] == list(left)
    with pytest.raises(ConfigError, match=r"there.python, .*account: still 'EDIT'. Write your own values in the site"):
        app(advised[:-1], standalone_mode=False)
    with pytest.raises(ConfigError, match=r"^site.there.python, site.there.folder: still 'EDIT'"):
        app(["attach", "runs/first", "--there", "/runs/x", "--site", "my.toml"], standalone_mode=False)
    assert len(login_node) == asked and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("partition", "jobs", "told"), [
    ("gpu", 1, ["Asking a node of partition gpu", "nvidia-smi, rocm-smi, amd-smi found a GPU on its node"]),
    ("cpu", 0, ["No node was asked: those of partition cpu have no GPUs"]),
])  # fmt: skip
def test_a_probe_that_finds_no_gpu_says_so(login_node, partition, jobs, told, tmp_path, capsys):
    words = ["--login", "frontier", "--partition", partition, "--probe"]
    app(["site", "init", str(tmp_path / "my.toml"), *words], standalone_mode=False)
    said = capsys.readouterr().err.splitlines()
    assert sum(words[0] == "srun" for words in login_node) == jobs
    assert len(said) == len(told) and all(part in line for part, line in zip(told, said, strict=True))


def test_the_command_on_a_real_slurm(sandbox, tmp_path):
    file = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["site", "init", str(file)])
    assert done.exit_code == 0, done.output
    site = Site.load(str(file))
    check_submittable(site)
    assert site.name == "sandbox" and site.slurm.partition in done.output
    assert "Other partitions: " in done.output
    again = CliRunner().invoke(app, ["site", "init", str(file)])
    assert again.exit_code and "is there already" in str(again.exception)


def test_a_probe_by_a_real_job(sandbox, tmp_path, monkeypatch):
    """A node asks the tools that it has: nvidia-smi is not there or fails, rocm-smi answers."""
    if inventory.choose(inventory.nodes_of(sandbox.run(*inventory.SINFO)), None).gpus == 0:
        pytest.skip("no device files that can pass for GPUs")
    for name, does in (("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9"), ("rocm-smi", f"cat {tmp_path}/said")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "said").write_text(RADEON)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = CliRunner().invoke(app, ["site", "init", str(tmp_path / "a.toml"), "--probe", "--account", "abc123"])
    assert done.exit_code == 0, (done.output, done.exception)
    site = Site.load(str(tmp_path / "a.toml"))
    assert site.device.name == "GPU Radeon RX 7900 XT" and site.slurm and site.slurm.account == "abc123"
    (tmp_path / "rocm-smi").write_text("#!/bin/sh\nexit 1\n")
    done = CliRunner().invoke(app, ["site", "init", str(tmp_path / "b.toml"), "--probe"])
    assert done.exit_code == 0 and Site.load(str(tmp_path / "b.toml")).device.memory_bytes is None, done.output


def test_where_there_is_no_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["site", "init", str(tmp_path / "mine.toml")])
    assert done.exit_code and "give --login NAME" in str(done.exception) and not list(tmp_path.iterdir())
