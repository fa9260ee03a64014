#!/bin/bash
# Runs one daemon of a sandbox in the foreground, or makes its network: daemon.sh NAME. The variables are those of
# Sandbox.values.
# shellcheck disable=SC2154
name=$1
export SLURM_CONF=$root/etc/slurm.conf MYSQL_UNIX_PORT=$root/run/mysqld.sock PATH=$PATH:/usr/sbin:/sbin:/usr/bin:/bin

munge() {
    exec munged -F -f -S "$root/run/munge.socket" --key-file="$root/etc/munge.key" --log-file="$root/log/munged.$1.log" \
        --pid-file="$root/run/munged.pid" --seed-file="$root/run/munged.seed"
}

wait_for() {  # COMMAND: until it is true, half a minute at most
    for _ in $(seq 1500); do "$@" 2> /dev/null && return; sleep 0.02; done
    echo "waited in vain for: $*"
    exit 1
}

answers() { : < "/dev/tcp/127.0.0.1/$1"; }

unplug() {  # NUMBER of a node; what is not there is not missed
    ip link del "${tag}v$1"
    ip netns del "$tag-node$1"
}

network_down() {
    for number in $(seq "$num_nodes"); do unplug "$number"; done
    ip link del "${tag}br"
} 2> /dev/null

network_up() {  # one virtual switch, with this machine as login node; nodes plug themselves in, and nothing leads outside
    network_down
    ip link add "${tag}br" type bridge && ip addr add "$network.1/24" dev "${tag}br" && ip link set "${tag}br" up
}

plug_in() {  # makes the network of a node anew; names as in Sandbox
    number=${name#node} bridge=${tag}br
    cable=${tag}v$number namespace=$tag-$name address=$network.$((10 + number))
    unplug "$number"
    ip netns add "$namespace"
    ip link add "$cable" type veth peer name eth0 netns "$namespace"
    ip link set "$cable" master "$bridge" up
    ip -n "$namespace" addr add "$address/24" dev eth0
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set eth0 up
}

database() {
    common=(--no-defaults "--datadir=$root/database")
    [ "$EUID" = 0 ] && common+=("--user=$user")
    if [ ! -d "$root/database/mysql" ]; then
        mkdir -p "$root/database"
        mariadb-install-db "${common[@]}" --auth-root-authentication-method=socket --skip-test-db || exit 1
    fi
    exec mariadbd "${common[@]}" --socket="$MYSQL_UNIX_PORT" --pid-file="$root/database/mysqld.pid" \
        --skip-networking --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0
}

power_on() {
    echo $$ > "$root/run/$name.pid"
    [ -e "$root/run/$name.off" ] && exit  # switched off just now: whoever did may not have found the number
    mkdir -p "$root/nodes/$name/spool" "$root/nodes/$name/run"
    if [ -z "$isolated" ]; then
        wait_for test -S "$root/run/munge.socket"
        exec slurmd -D -N "$name"
    fi
    rm -f "$root/nodes/$name/run/"*  # sockets and pid files of a node that was switched off
    plug_in
    exec nsenter --net="/run/netns/$namespace" unshare --uts --mount --pid --fork --mount-proc --kill-child \
        bash "$0" inside "$name"
}

inside() {  # the same paths as everywhere, but its own sockets, scratch and memory
    hostname "$1"
    mount --bind "$root/etc/hosts" /etc/hosts
    mount -t tmpfs -o size=64m tmpfs "$root/scratch"
    mount -t tmpfs -o size=2g tmpfs /dev/shm
    mount --bind "$root/nodes/$1/run" "$root/run"
    munge "$1" &
    wait_for test -S "$root/run/munge.socket"
    slurmd -D -N "$1"  # no exec: the first process of a node reaps what loses its parent
}

case $name in
    munged) munge login ;;
    mariadbd) database ;;
    slurmdbd)
        wait_for test -S "$MYSQL_UNIX_PORT" -a -S "$root/run/munge.socket"
        exec slurmdbd -D ;;
    controller)
        wait_for test -S "$root/run/munge.socket"
        [ "$storage" = none ] || wait_for answers "$database_port"
        exec slurmctld -D ;;
    inside) inside "$2" ;;
    network_up | network_down) "$name" ;;
    *) power_on ;;
esac
