"""Folder of a Slurm sandbox (simulated cluster): files of other users in the folder are never
trusted, overwritten or run.
"""

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from cluster import sandbox
from cluster.sandbox import Sandbox, write_configuration
from cluster.sandbox.__main__ import main
from cluster.state import JobError


@pytest.fixture
def common():
    """A folder with the mode of /tmp: all users can create files, and each user can delete only
    their own files.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@pytest.fixture
def assert_all_refuse(monkeypatch, capsys):
    """Returns a function that checks that every command refuses a sandbox folder and gives the
    reason.
    """

    def hold(root, why):
        message = rf"^{root} is no folder that you alone can write to: {why}.*Remove it, or give"
        with pytest.raises(JobError, match=message):
            Sandbox.find(root)
        monkeypatch.setattr(sandbox, "why_not", lambda accounting: None)
        for action in ("start", "stop", "status"):
            monkeypatch.setattr("sys.argv", ["sandbox", action, "--root", str(root)])
            assert main() == 1 and "Remove it" in capsys.readouterr().err

    return hold


def test_folder_writable_by_others_is_refused(tmp_path, assert_all_refuse):
    """Links and files in place of the folder are refused too."""
    folder = tmp_path / "open"
    folder.mkdir()
    for mode, word in ((0o777, "drwxrwxrwx"), (0o770, "drwxrwx---"), (0o1777, "drwxrwxrwt")):
        folder.chmod(mode)
        assert_all_refuse(folder, word)
    folder.chmod(0o755)
    assert Sandbox.find(folder) is None
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name, word in (("link", "l"), ("dangling", "l"), ("file", "-")):
        assert_all_refuse(tmp_path / name, word)
    assert not list(folder.iterdir()) and not (tmp_path / "nowhere").exists()


def test_folder_of_another_user_is_refused(common, assert_all_refuse):
    """Only the owner of the folder, who is another user, can access it now. The owner may have
    planted files in the folder, so it is refused.
    """
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    (common / "key").write_bytes(b"secret")
    plant = f'mkdir -p "$0/etc" && ln -s {common}/key "$0/etc/munge.key" && chmod 700 "$0"'
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    subprocess.run(["sh", "-c", plant, common / "sandbox"], check=True, **nobody)
    assert_all_refuse(common / "sandbox", "drwx------, of user 65534")
    assert (common / "key").read_bytes() == b"secret"
    assert [path.name for path in (common / "sandbox").rglob("*")] == ["etc", "munge.key"]


def test_munge_key_link_is_replaced_by_a_file(tmp_path):
    mine = Sandbox(root=str(tmp_path / "sandbox"), isolated=False)
    key = mine.path("etc", "munge.key")
    key.parent.mkdir(parents=True)
    (tmp_path / "mine").write_bytes(b"mine")
    key.symlink_to(tmp_path / "mine")
    for _ in range(2):
        write_configuration(mine)
        assert stat.S_IMODE(key.lstat().st_mode) == 0o600 and len(key.read_bytes()) == 128
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_new_folder_is_private_to_its_user(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda accounting: None)
    seen = []

    def write(found):
        seen.append(stat.S_IMODE(os.stat(found.root).st_mode))
        raise JobError("far enough")

    monkeypatch.setattr(sandbox, "write_configuration", write)
    with pytest.raises(JobError, match="far enough"):
        Sandbox.start(tmp_path_factory.mktemp("s") / "a" / "sandbox")
    assert seen == [0o700]


def test_path_too_long_for_sockets_is_refused(tmp_path, monkeypatch):
    """Slurm would hold each job of such a sandbox with the reason "launch failed"."""
    monkeypatch.setattr(sandbox, "why_not", lambda accounting: None)
    long = tmp_path / ("x" * 60)
    with pytest.raises(JobError, match=r"too long for a sandbox, by \d+ bytes.*Give a shorter"):
        Sandbox.start(long)
    assert not long.exists()
