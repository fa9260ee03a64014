"""A first site file from what a cluster says: recorded resources of others, and the real Slurm."""

import shlex
import tomllib
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster.login import mirror, submit
from cluster.record import ConfigError
from cluster.render import check_submittable
from cluster.site import Site
from cluster.slurm import inventory
from cluster.state import JobError
from kit.commands import machines
from kit.commands.app import app

CONFIG = """\
Configuration data as of 2026-11-23T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = big gpu
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldParameters     = enable_configless
"""


# Written as in: molbuilder's and nodetop's tests of scontrol (A100), JHU's DSAI pages (H100),
# LUMI's documentation (mi250), a public note with `gpu:A100:4(S:0-1),lscratch:3570`,
# slurm_usage_history's tests (two kinds on a node).
@pytest.mark.parametrize(
    ("gres", "expected"),
    [
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
    ],
)
def test_generic_resources(gres, expected):
    file = f"gpu*|2|64|257000|30:00|1|{gres}"
    text = inventory.site_text(*inventory.nodes_of(file), {})
    said = tomllib.loads(text)
    kind, _, count = said["slurm"].get("gpus_per_node", "0").rpartition(":")
    assert (int(count), kind) == expected and said["devices_per_node"] == (expected[0] or 64)


def test_time_limits():
    limits = {"2-00:00:00": 172800, "12:00:00": 43200, "30:00": 1800, "1:30": 90}
    for limit, seconds in {**limits, "infinite": None, "n/a": None}.items():
        assert inventory.seconds(limit) == seconds


LINES = """\
cpu*|1024|128|257000|infinite|1-infinite|(null)
gpu|80|128|515000|2-00:00:00|1-64|gpu:a100:4(S:0-1)
gpu|11|112+|2063000+|2-00:00:00|1-64|gpu:h100:8(S:0-1)
debug|2|64|257000|30:00|1|gpu:4
"""


def write(tmp_path, partition=None, lines=LINES, **more):
    nodes = inventory.choose(inventory.nodes_of(lines), partition)
    file = tmp_path / "site.toml"
    file.write_text(inventory.site_text(nodes, inventory.settings_of(CONFIG), **more))
    return Site.load(str(file)), file.read_text()


@pytest.mark.parametrize(
    ("partition", "devices", "gpus", "max_nodes", "max_s"),
    [
        (None, 4, "a100:4", 64, 48 * 3600),  # nodes with GPUs come first
        ("debug", 4, "4", 1, 1800),
        ("cpu", 128, None, None, None),
    ],
)
def test_nodes_of_a_partition(tmp_path, partition, devices, gpus, max_nodes, max_s):
    site, _ = write(tmp_path, partition)
    slurm = site.slurm
    found = (site.devices_per_node, slurm.gpus_per_node, slurm.max_nodes, slurm.max_seconds(1))
    assert found == (devices, gpus, max_nodes, max_s)
    assert site.device.is_gpu == (gpus is not None)


def test_what_slurm_does_not_know_is_left_open(tmp_path):
    site, text = write(tmp_path)
    assert (site.name, site.slurm.partition, site.slurm.cpus_per_task) == ("big-gpu", "gpu", 32)
    assert site.device.name == "GPU a100" and not site.device.peak_flops_per_s
    # 40 or 80 GB: GRES does not say.
    assert site.device.memory_bytes is None and "EDIT: memory_bytes" in text
    assert site.slurm.account == "EDIT" and site.slurm.sbatch_options == ("--mem=0",)
    with pytest.raises(ConfigError, match="slurm.account"):
        check_submittable(site)
    site, text = write(tmp_path, login="frontier", account="abc123")
    assert site.slurm.account == "abc123" and 'account = "EDIT"' not in text
    assert site.login == "frontier" and site.there.sync and "/EDIT/bin/python" in text


def test_each_line_to_edit_takes_a_value_in_its_place(tmp_path):
    _, text = write(tmp_path, login="frontier")
    filled = text.replace("/EDIT/", "/home/me/").replace('account = "EDIT"', 'account = "abc123"')
    edited = {"price_per_node_hour": "9", "memory_bytes": "85899345920"}
    for name, value in {**edited, "bf16": "312e12", "inter_node_bytes_per_s": "100e9"}.items():
        assert f"# EDIT: {name} = {{ value = 0" in filled
        filled = filled.replace(f"# EDIT: {name} = {{ value = 0", f"{name} = {{ value = {value}")
    (tmp_path / "mine.toml").write_text(filled)
    site = Site.load(str(tmp_path / "mine.toml"))
    check_submittable(site)
    assert site.device.memory_bytes.value == 80 * 2**30 and site.peak_flops_per_s("bf16") == 312e12
    assert site.links.inter_node_bytes_per_s.value == 100e9 and site.price_per_node_hour.value == 9


def kit_site_init(file, *words):
    return CliRunner().invoke(app, ["site", "init", str(file), *words])


def test_a_file_of_this_machine(tmp_path):
    done = kit_site_init(tmp_path / "desk.toml", "--local")
    assert done.exit_code == 0 and "kit launch runs/first --site" in done.output, done.exception
    site = Site.load(tmp_path / "desk.toml")
    assert site.scheduler == "local" and site.devices_per_node >= 1
    wrong = kit_site_init(tmp_path / "b.toml", "--local", "--account", "x")
    assert "--account: not with --local" in str(wrong.exception)
    assert not (tmp_path / "b.toml").exists()


def test_gpus_of_this_machine_are_what_torch_sees(tmp_path, monkeypatch):
    """Its name and memory, as recorded on a machine with two of them."""
    import torch

    told = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=84929347584)
    says = {"is_available": True, "device_count": 2, "get_device_properties": told}
    for name, value in says.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert kit_site_init(tmp_path / "desk.toml", "--local").exit_code == 0
    site = Site.load(tmp_path / "desk.toml")
    assert site.device.is_gpu and "H100" in site.device.name and site.devices_per_node == 2
    assert site.device.memory_bytes.value == pytest.approx(84929347584, rel=1e-5)


@pytest.fixture
def login_node(monkeypatch):
    """A cluster behind ssh whose commands answer at once; returns what it was asked, and refuses
    all else.
    """
    asked = []
    answers = {"sinfo": LINES, "scontrol": CONFIG}

    def ssh(login, command, data=b"", timeout_s=0.0):
        asked.append(shlex.split(shlex.split(command)[-1]))
        if asked[-1][0] not in answers:
            raise JobError(f"{login}: exit code 127: {asked[-1][0]}: No such file or directory")
        return answers[asked[-1][0]].encode()

    for place in (machines, submit, mirror):
        monkeypatch.setattr(place, "ssh", ssh)
    return asked


def test_what_is_advised_after_a_first_file_needs_no_connection(
    login_node, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    app(["site", "init", "my.toml", "--login", "frontier"], standalone_mode=False)
    said = capsys.readouterr().out.splitlines()
    lines = enumerate((tmp_path / "my.toml").read_text().splitlines(), 1)
    marked = [(n, line) for n, line in lines if "EDIT:" in line]
    assert said[2:] == [f"  my.toml, line {n}: {line}" for n, line in marked]
    assert marked[0][0] > 1, "the heading is nothing to edit"
    assert any("# EDIT: inter_node" in line for line in said)
    asked = len(login_node)
    advised = shlex.split(said[1].split("kit ")[1])
    assert advised == ["launch", "runs/first", "--site", "my.toml", "--show"]
    app(advised, standalone_mode=False)
    left = [line.strip() for line in capsys.readouterr().err.splitlines()][1:]
    fields = ("site.there.python", "site.there.folder", "site.slurm.account")
    assert left == [f"{field}: in my.toml" for field in fields]
    to_another_folder = [*advised[:2], "--there", "/runs/x", *advised[2:-1]]
    for words, message in (
        (advised[:-1], r"there.python, .*account: still 'EDIT'. Write your own values in the site"),
        (to_another_folder, r"^site.there.python, site.there.folder: still 'EDIT'"),
    ):
        with pytest.raises(ConfigError, match=message):
            app(words, standalone_mode=False)
    assert len(login_node) == asked and not (tmp_path / "runs").exists()


def test_the_command_on_a_real_slurm(sandbox, tmp_path):
    file = tmp_path / "mine.toml"
    done = kit_site_init(file)
    assert done.exit_code == 0 and "Other partitions: " in done.output, done.output
    site = Site.load(file)
    check_submittable(site)
    assert site.name == "sandbox" and site.slurm.partition in done.output
    assert "already exists" in str(kit_site_init(file).exception)


def test_where_there_is_no_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = kit_site_init(tmp_path / "mine.toml")
    assert "give --login NAME" in str(done.exception) and not list(tmp_path.iterdir())
