"""One virtual switch and one network namespace per node. Needs root; Linux, iproute2."""

import os
import subprocess

from cluster.sandbox.configuration import Layout
from cluster.state import JobError

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21  # linux/capability.h


def is_possible() -> bool:
    """Whether this process may make network namespaces."""
    with open("/proc/self/status", encoding="ascii") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return os.geteuid() == 0 and all(effective >> bit & 1 for bit in (CAP_NET_ADMIN, CAP_SYS_ADMIN))


def bridge(layout: Layout) -> str:
    return f"{layout.tag}br"


def cable(layout: Layout, node: str) -> str:
    """Returns the interface by which a node is plugged into the switch."""
    return f"{layout.tag}v{node.removeprefix('node')}"


def namespace(layout: Layout, node: str) -> str:
    return f"{layout.tag}-{node}"


def up(layout: Layout) -> None:
    """Makes the switch, with this machine on it as login node, and plugs in every node. Nothing leads outside."""
    commands = [f"link add {bridge(layout)} type bridge", f"addr add {layout.network}.1/24 dev {bridge(layout)}"]
    commands.append(f"link set {bridge(layout)} up")
    for node in layout.nodes:
        inside = f"-n {namespace(layout, node)}"
        commands += [
            f"netns add {namespace(layout, node)}",
            f"link add {cable(layout, node)} type veth peer name eth0 netns {namespace(layout, node)}",
            f"link set {cable(layout, node)} master {bridge(layout)} up",
            f"{inside} addr add {layout.node_address(node)}/24 dev eth0",
            f"{inside} link set lo up",
            f"{inside} link set eth0 up",
        ]
    for command in commands:
        _ip(command)


def down(layout: Layout) -> None:
    """Removes all of it; what is not there is not missed."""
    for node in layout.nodes:
        _ip(f"link del {cable(layout, node)}", check=False)
        _ip(f"netns del {namespace(layout, node)}", check=False)
    _ip(f"link del {bridge(layout)}", check=False)


def cut(layout: Layout, node: str) -> None:
    """Pulls the cable at the switch: the node notices nothing, its packets just get lost."""
    _ip(f"link set {cable(layout, node)} nomaster")


def heal(layout: Layout, node: str) -> None:
    """Plugs the cable in again."""
    _ip(f"link set {cable(layout, node)} master {bridge(layout)}")


def remove_left_overs(layout: Layout) -> None:
    """Removes network and mounts of a sandbox whose processes are gone; what is not there is not missed."""
    if layout.isolated:
        down(layout)
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            mounted = [line.split()[1] for line in mounts]
        if str(layout.path("small")) in mounted:
            subprocess.run(["umount", "--lazy", layout.path("small")], check=False)
    layout.path("run", "keeper.socket").unlink(missing_ok=True)


def _ip(command: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if check and done.returncode:
        raise JobError(f"ip {command}: {done.stderr.strip()}. Remove left-overs with: python -m cluster.sandbox stop")
