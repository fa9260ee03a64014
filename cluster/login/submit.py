"""Submits a job to a cluster behind a login node. The records of job and site are sent, and the kit
on the login node submits the job (`cluster.submission.submit`).
"""

import gzip
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.attempts import Files, new_folders, write_files
from cluster.interpreter import CONTAINER_PYTHON, PACKAGE_ROOT
from cluster.job import Job, JobSpec
from cluster.login.connection import NoConnectionError, ssh, ssh_line
from cluster.login.mirror import (
    IS_OWN,
    MIRROR_FILE,
    SYNCED,
    Mirror,
    MirroredRun,
    command,
    fetch,
    mirror_of,
)
from cluster.logs import end_reason
from cluster.poll import backend
from cluster.record import ConfigError
from cluster.render import check_submittable
from cluster.scheduler import Slurm
from cluster.site import RemotePaths, Site
from cluster.state import JobError


def submit(job: JobSpec, site: Site, files: Files | None = None) -> Job:
    """Submits a job through its site's login node. Returns the handle of the job. Its run directory
    on this machine becomes a mirror of the run directory on the cluster.

    Raises:
        ConfigError, JobError: The job cannot run on the cluster, or the cluster refuses the job.
            Nothing was started.
        NoConnectionError: There is no connection. If the connection was lost after the job was
            sent, the mirror is kept. As soon as there is a connection again, the status of the
            mirror says whether the job runs.
    """
    run_dir = Path(job.run_dir)
    known = mirror_of(run_dir)
    if known:
        directory = known.mirror.directory
    else:
        directory = f"{_there(site).folder}/{run_dir.name}"
    mirror = _mirror(site, directory)
    # Raises an error if there is no connection, before files are written.
    mirror.send_request(do="lacking", paths=[])
    there = _translated(job, mirror.python, mirror.source, mirror.directory)
    theirs = site.replace(login=None, there=None)
    asked = {"job.json": there.to_json(), **(files or {})}
    kept = {MIRROR_FILE: mirror.to_json(), **asked, "site.json": site.to_json()}
    with new_folders(run_dir):
        try:
            mirror.send_request(
                do="submit",
                job=there.to_dict(),
                site=theirs.to_dict(),
                files={**asked, "site.json": theirs.to_json()},
                new=known is None,
            )
        except NoConnectionError as error:
            write_files(run_dir, kept)
            told = f"{error}. Whether the job was taken: `kit status` tells then."
            raise NoConnectionError(told) from error
        write_files(run_dir, kept)
    MirroredRun(run_dir, mirror).update_report(now=True)
    return Job.attach(run_dir)


def texts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns the scripts of a job by file name, with paths on the cluster. The scripts are for
    display: they are written on this machine, without a request to the cluster.
    """
    there = _there(site)
    theirs = site.replace(login=None, there=None)
    job = _translated(
        job, there.python, str(there.source), f"{there.folder}/{Path(job.run_dir).name}"
    )
    return backend(site.scheduler).texts(job, theirs, there)


def first_commands(site: Site) -> list[str]:
    """Returns the first ssh commands by which a launch reaches the login node, for display. Runs
    none of them.
    """
    there = _there(site)
    source = str(there.source)
    commands = [] if there is site.there else [_is_there(source)]
    return [
        ssh_line(str(site.login), each)
        for each in (*commands, command(source, there.python, "cluster.login.answer"))
    ]


def attach(run_dir: Path, site: Site, directory: str) -> Job:
    """Makes a mirror of a run that already is on the cluster, and returns the handle of its job.
    The run may have been launched from any machine.

    Args:
        run_dir: new folder of the mirror on this machine.
        site: site with a login node.
        directory: absolute path of the run directory on the cluster.

    Raises:
        ConfigError: The site has no login node, `run_dir` is not empty, or `directory` is relative.
        NoConnectionError: The login node cannot be reached.
        JobError: The directory on the cluster is no run directory.
    """
    if site.login is None:
        raise ConfigError(
            f"site.login: {site.name!r} has none. Give a site file with login and [there]."
        )
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} exists. Give a new directory for the mirror.")
    if not directory.startswith("/"):
        raise ConfigError(
            f"--there {directory!r} is not allowed. Give the absolute path of the run directory"
            " there."
        )
    mirror = _mirror(site, directory)
    with new_folders(run_dir):
        try:
            fetch(run_dir, mirror)
        except JobError:
            shutil.rmtree(run_dir)
            raise
        write_files(run_dir, {MIRROR_FILE: mirror.to_json(), "site.json": site.to_json()})
    return Job.attach(run_dir)


def check_remote_paths(site: Site, paths: list[str], module: str) -> None:
    """Raises ConfigError unless all of `paths` are absolute and exist on the login node, and the
    Python of the site's jobs finds `module`.

    Also raises ConfigError, without a request to the login node, if the site file is incomplete.
    """
    check_submittable(site)
    if relative := [path for path in paths if not path.startswith("/")]:
        raise ConfigError(
            f"recipe.data: {relative[0]!r} is read on {site.login}. Give its absolute path there."
        )
    mirror = _mirror(site, "")
    if lacking := mirror.send_request(do="lacking", paths=paths)["lacking"]:
        raise ConfigError(
            f"recipe.data: {lacking[0]!r} is not on {site.login}. Build or copy the data there"
            " first."
        )
    slurm = site.slurm or Slurm()
    words = _look_for(module, mirror.python, slurm)
    if f"lacks {module}".encode() in ssh(mirror.login, f"exec bash -lc {shlex.quote(words)}"):
        if slurm.container:
            raise ConfigError(
                f"site.slurm.container: {list(slurm.container)} on {mirror.login} has no {module},"
                " so the job would fail at its start. Give an image that has it."
            )
        raise ConfigError(
            f"there.python: {mirror.python} on {mirror.login} has no {module}, so the job would"
            " fail at its start. Give the Python of an environment that has it."
        )


def _look_for(module: str, python: str, slurm: Slurm) -> str:
    """Returns a shell script that prints `lacks MODULE` if the Python of a job does not find the
    module. The script tests nothing if lines of the site file, such as a PYTHONPATH, may provide
    the module.
    """
    if slurm.has_tasks_in_container:
        return "exit"
    if slurm.has_own_environment or re.search(
        r"PYTHONPATH|PYTHONHOME|activate|\bsource |['; ]\. ", repr(slurm)
    ):
        return "exit"
    loads = [f"module load {shlex.quote(name)} || exit 0" for name in slurm.modules]
    code = f"import importlib.util as u; print(u.find_spec({module!r}) or 'lacks {module}')"
    if slurm.container:
        # The login node may be unable to start the container. The script then exits with code 0,
        # and the container is tested only on the compute nodes.
        words = [*slurm.container, CONTAINER_PYTHON, "-P", "-c", code]
        setup = ["fail() { exit 0; }", *loads, *slurm.setup]
        return "\n".join([*setup, f"{shlex.join(words)} || exit 0"])
    return "\n".join([*loads, shlex.join([python, "-P", "-c", code])])


def _translated(job: JobSpec, python: str, source: str, directory: str) -> JobSpec:
    """Returns `job` for the cluster: its Python and run directory are replaced by `python` and
    `directory`, and the working directory is `source`.
    """
    words = {sys.executable: python, job.run_dir: directory}
    argv = tuple(words.get(word, word) for word in job.argv)
    return job.replace(run_dir=directory, working_directory=source, argv=argv)


def _mirror(site: Site, directory: str) -> Mirror:
    """Returns the content of login.json for the run directory `directory` on the cluster. If the
    site file sets `sync`, first copies this kit's source to the cluster.
    """
    assert site.login is not None
    there = _there(site)
    check_submittable(site.replace(slurm=None))  # A mirror needs no account under [slurm].
    source = str(there.source)
    if there is not site.there:  # The site file sets `sync`.
        _sync(site.login, source)
    return Mirror(login=site.login, python=there.python, source=source, directory=directory).own()


def _there(site: Site) -> RemotePaths:
    """Returns a site's table [there] with its field `source` filled in. If the site file sets
    `sync`, `source` is the folder on the cluster for a copy of this kit. The name of the folder is
    the hash of the source.
    """
    if site.there is None:
        raise ConfigError(
            f"site.there: missing. With login = {site.login!r} the site file says under [there]"
            " which `python` runs there and in which `folder` runs lie."
        )
    if site.there.source:
        return site.there
    # Several users may share `folder`. Each user has a separate copy of the source in it, since
    # source of another user is never run.
    parent = f"{site.there.folder}{SYNCED}{os.environ.get('USER', os.getuid())}"
    source = f"{parent}/{hashlib.sha256(source_archive()).hexdigest()[:16]}"
    return site.there.replace(source=source, sync=False)


def _is_there(source: str) -> str:
    return f"test -d {shlex.quote(source)} && echo yes || echo no"


def _sync(login: str, source: str) -> None:
    """Copies this kit's source to the folder `source` on the login node, unless the folder exists.
    Each command that later uses the folder first tests who owns it (IS_OWN).
    """
    if b"yes" in ssh(login, _is_there(source)):
        return
    place, new, parent = map(shlex.quote, (source, f"{source}.new", os.path.dirname(source)))
    make = (  # With mode 700, a default ACL of the parent gives nobody else access.
        f"mkdir -p {parent} && umask 077 && rm -rf {new} && mkdir -m 700 {new}"
    )
    fill = f"{make} && cd {new} && {IS_OWN} && tar -xzf - && mv -T {new} {place}"
    ssh(login, f"exec bash -c {shlex.quote(fill)}", source_archive())


def source_archive() -> bytes:
    """Returns the packages `kit` and `cluster` as one .tar.gz archive. Equal source gives equal
    bytes, so that a hash of the archive identifies the version.

    Raises:
        JobError: The command tar fails. The message contains the output of tar.
    """
    words = ["tar", "-cf", "-", "--exclude=__pycache__", "--sort=name", "--mtime=@0", "--owner=0"]
    words += ["--group=0", "--numeric-owner", "--mode=u=rwX,go=rX", "cluster", "kit"]
    done = subprocess.run(words, cwd=PACKAGE_ROOT, capture_output=True)
    if done.returncode:
        said = end_reason(done.stderr.decode(errors="replace"))
        raise JobError(f"the source in {PACKAGE_ROOT} cannot be packed: {said}")
    return gzip.compress(done.stdout, mtime=0)
