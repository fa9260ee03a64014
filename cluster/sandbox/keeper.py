"""The process that owns all daemons of a sandbox: starts them, restarts the controller, ends them with itself.

    python -m cluster.sandbox.keeper ROOT

It listens on ROOT/run/keeper.socket for one-line orders: `on NODE`, `off NODE` (power), `restart` (the controller ends
and comes back after CONTROLLER_PAUSE_S) and `stop`. Every daemon runs in the foreground as its child, so that each is
reaped, and none can outlive it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster.descendants import become_rank, become_subreaper, kill_descendants
from cluster.process import Process
from cluster.sandbox import network
from cluster.sandbox.configuration import Layout

CONTROLLER_PAUSE_S = 10.0


class Keeper:
    """The daemons of one sandbox."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.daemons: dict[str, subprocess.Popen] = {}
        self.controller_from = 0.0

    def start(self) -> None:
        """Starts everything."""
        layout = self.layout
        if layout.isolated:
            network.up(layout)
            self._mount_small()
        root = layout.root
        self._daemon(
            "munged", "munged", "-F", "-f", f"--socket={root}/run/munge.socket", f"--key-file={root}/etc/munge.key",
            f"--log-file={root}/log/munged.log", f"--pid-file={root}/run/munged.pid",
            f"--seed-file={root}/run/munged.seed",
        )  # fmt: skip
        _wait_for(layout.path("run", "munge.socket"))
        if layout.accounting:
            self._database()
        self._daemon("controller", "slurmctld", "-D")
        for node in layout.nodes:
            self.power_on(node)

    def power_on(self, node: str) -> None:
        """Starts a node."""
        if node in self.daemons:
            return
        if not self.layout.isolated:
            self._daemon(node, "slurmd", "-D", "-N", node)
            return
        for left_over in self.layout.path("nodes", node, "run").iterdir():  # sockets and pid files of a dead node
            left_over.unlink()
        init = str(self.layout.path("etc", "node.sh"))
        self._daemon(
            node, "nsenter", f"--net=/run/netns/{network.namespace(self.layout, node)}", "unshare", "--uts", "--mount",
            "--pid", "--fork", "--mount-proc", "--kill-child", init, node, self.layout.root,
        )  # fmt: skip

    def power_off(self, node: str) -> None:
        """Ends a node and all its processes at once, as by pulling the plug."""
        daemon = self.daemons.pop(node, None)
        if daemon:
            daemon.kill()
            daemon.wait()

    def restart_controller(self) -> None:
        """Ends the controller, which saves its state; `tend` starts it again after a pause."""
        self.daemons["controller"].terminate()
        self.daemons["controller"].wait()
        self.controller_from = time.monotonic() + CONTROLLER_PAUSE_S

    def tend(self) -> None:
        """Reaps what has ended, and starts a controller that is due."""
        for daemon in self.daemons.values():
            daemon.poll()
        with contextlib.suppress(ChildProcessError):
            own = {daemon.pid for daemon in self.daemons.values()}
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if info.si_pid in own:
                    break
                os.waitpid(info.si_pid, 0)
        if self.daemons["controller"].returncode is not None and time.monotonic() >= self.controller_from:
            self._daemon("controller", "slurmctld", "-D")

    def stop(self) -> None:
        """Ends all daemons and removes network and mounts."""
        for name in [name for name in self.daemons if name.startswith("node")]:
            self.power_off(name)
        for name in ("controller", "slurmdbd", "mariadbd", "munged"):
            daemon = self.daemons.pop(name, None)
            if daemon and daemon.poll() is None:
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(5)
        kill_descendants()
        network.remove_left_overs(self.layout)

    def _daemon(self, name: str, *command: str) -> None:
        keeper = os.getpid()
        environment = {**os.environ, "SLURM_CONF": self.layout.slurm_conf}
        environment["MYSQL_UNIX_PORT"] = str(self.layout.path("run", "mysqld.sock"))
        environment["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
        with self.layout.path("log", f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/",
                start_new_session=True, preexec_fn=lambda: become_rank(keeper),
            )  # fmt: skip

    def _database(self) -> None:
        root, data = self.layout.path(), self.layout.path("database")
        socket_file = root / "run" / "mysqld.sock"
        user = [f"--user={os.environ.get('USER', 'root')}"] if os.geteuid() == 0 else []
        common = ["--no-defaults", *user, f"--datadir={data}"]
        if not data.exists():
            data.mkdir()
            with (root / "log" / "mariadb-install.log").open("ab") as log:
                subprocess.run(
                    ["mariadb-install-db", *common, "--auth-root-authentication-method=socket", "--skip-test-db"],
                    stdout=log, stderr=log, check=True,
                )  # fmt: skip
        self._daemon("mariadbd", "mariadbd", *common, f"--socket={socket_file}", f"--pid-file={data}/mysqld.pid",
                     "--skip-networking", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
                     "--innodb-flush-log-at-trx-commit=0")  # fmt: skip
        _wait_for(socket_file, 30)
        self._daemon("slurmdbd", "slurmdbd", "-D")
        _wait_for_port(self.layout.controller_port + 1)

    def _mount_small(self) -> None:
        # Before the nodes start, so that all of them see it: the shared file system that can fill up.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", self.layout.path("small")], check=True)


def serve(layout: Layout) -> None:
    """Runs the sandbox until it is told to stop."""
    become_subreaper()
    keeper, ending = Keeper(layout), []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ending.append(number))
    address = str(layout.path("run", "keeper.socket"))
    with socket.socket(socket.AF_UNIX) as server:
        try:
            keeper.start()
            server.bind(address)
            os.chmod(address, 0o600)
            server.listen()
            server.settimeout(1.0)
            while not ending:
                keeper.tend()
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    with connection:
                        _obey(keeper, connection, ending)
        finally:
            keeper.stop()


def _obey(keeper: Keeper, connection: socket.socket, ending: list) -> None:
    connection.settimeout(2.0)
    words = connection.recv(256).decode().split()
    match words:
        case ["on", node] if node in keeper.layout.nodes:
            keeper.power_on(node)
        case ["off", node] if node in keeper.layout.nodes:
            keeper.power_off(node)
        case ["restart"]:
            keeper.restart_controller()
        case ["stop"]:
            ending.append(words)
        case _:
            connection.sendall(f"unknown order {words!r}".encode())
            return
    connection.sendall(b"ok")


def _wait_for(file: Path, wait_s: float = 5.0) -> None:
    deadline = time.monotonic() + wait_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file} did not appear in {wait_s:g} s; see the files in {file.parents[1] / 'log'}")
        time.sleep(0.02)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    """Leaves the sandbox to a process of its own, whose identity is in keeper.json."""
    layout = Layout.read(Path(sys.argv[1], "sandbox.json"))
    started, starting = os.pipe()
    if os.fork():
        os.close(starting)
        os.read(started, 1)
        os._exit(0)
    Process.current().write(layout.path("keeper.json"))
    os.close(starting)
    serve(layout)


if __name__ == "__main__":
    main()
