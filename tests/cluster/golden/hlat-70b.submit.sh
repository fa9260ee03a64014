#!/bin/bash
# hlat-70b: runs 8,192 ranks on 256 nodes of trn1.32xlarge, each with
#   ["/shared/environment/bin/python", "-P", "-m", "kit.train", "--run", "/shared/runs/hlat-70b"]
# Submit from the run directory, which needs a folder logs: sbatch compile.sh, and after its success sbatch submit.sh
# Asked of Slurm where the site file says nothing:
#   No GRES: Slurm does not count NeuronCores, so the job takes whole nodes.
#   --mem=0: all memory of each node, of which Slurm may give a part by default.
#   No --time: neither --minutes nor [[slurm.walltime]] gives a limit, so the default of the partition holds (`scontrol show partition`).
# WARNING: the ranks of 256 nodes would all read Python and its packages from the shared file system, at 33,000 file calls each. Pack them once, `tar -C /shared/environment -cf environment.tar .`, and give the file as archive, and a folder on each node's own disk as directory, under [slurm.broadcast] in the site file; or start the ranks in a container.
# ----------------------------------------------------------------------------------------------------
#SBATCH --job-name=hlat-70b
#SBATCH --partition=compute1
#SBATCH --nodes=256
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=128
#SBATCH --output=logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --exclusive
#SBATCH --mem=0
# ----------------------------------------------------------------------------------------------------
fail() { echo "kit: $*" >&2; exit 1; }
export KIT_RUN_DIR=/shared/runs/hlat-70b
export PATH=/shared/environment/bin:"$PATH"
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export NEURON_CC_FLAGS='--model-type transformer --distribution-strategy=llm-training'
export NEURON_FUSE_SOFTMAX=1
export NEURON_RT_EXEC_TIMEOUT=4000
export MALLOC_ARENA_MAX=64
export FI_PROVIDER=efa
export FI_EFA_USE_DEVICE_RDMA=1
export FI_EFA_FORK_SAFE=1
# Where the ranks meet: the first node of the job.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -xm 1 '[[:alnum:]._-]\+')
[ -n "$MASTER_ADDR" ] || fail "scontrol names no host in $SLURM_JOB_NODELIST"
export MASTER_ADDR MASTER_PORT=41000
# ----------------------------------------------------------------------------------------------------
# What each rank runs.
run_rank() {
    printf -v log '%s/logs/attempt_%02d/rank_%05d.log' "$KIT_RUN_DIR" "$KIT_ATTEMPT" "$RANK"
    [ "$RANK" != 0 ] || exec >>"$log" 2>&1 || exit
    export XLA_USE_BF16=0
    export XLA_DOWNCAST_BF16=1
    export NEURON_RT_STOCHASTIC_ROUNDING_EN=0
    export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=31
    export NEURON_EXPERIMENTAL_COMPRESS_RG=1
    export TORCH_DIST_INIT_BARRIER=0
    cd /shared/work || exit
    exec /shared/environment/bin/python -P /shared/kit/cluster/start.py kit.train --run /shared/runs/hlat-70b
}
export -f run_rank
# What each node runs: an agent that starts the node's ranks.
run_node() {
    # Lines of site.slurm.task_setup. One that fails ends the script, unless it ends with `|| true`.
    KIT_DEPTH=${#BASH_SOURCE[@]}
    trap 'KIT_CODE=$?; [ ${#BASH_SOURCE[@]} != "$KIT_DEPTH" ] || { trap - EXIT; echo "kit: task_setup: ${KIT_LINE[0]} failed with code $KIT_CODE" >&2; exit 1; }' ERR
    trap 'echo "kit: task_setup: ${KIT_LINE[0]} ended the shell with code $?" >&2; exit 1' EXIT
    KIT_LINE=($'ulimit -n 131071 || echo \'the limit of open files stays as it is\' >&2')
    ulimit -n 131071 || echo 'the limit of open files stays as it is' >&2
    KIT_LINE=($'sudo -n sysctl -w net.ipv4.ip_local_reserved_ports=44000,48620,41000,23456 || echo \'the ports of the Neuron runtime are not reserved\' >&2')
    sudo -n sysctl -w net.ipv4.ip_local_reserved_ports=44000,48620,41000,23456 || echo 'the ports of the Neuron runtime are not reserved' >&2
    trap - ERR EXIT
    export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
    exec /shared/environment/bin/python -P -m torch.distributed.run \
        --nnodes=256 --node-rank="$SLURM_NODEID" --nproc-per-node=32 \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python bash -c run_rank
}
export -f run_node
# Compiled graphs: from the shared cache to each node's own disk, which all ranks can read at once.
export KIT_SHARED_CACHE="/fsx/$USER/neuron-compile-cache"
export NEURON_COMPILE_CACHE_URL="/local_storage/$USER/neuron-compile-cache"
[ -d "$KIT_SHARED_CACHE" ] || fail "no compiled graphs in $KIT_SHARED_CACHE: submit compile.sh first"
copy_cache() {
    mkdir -p "$NEURON_COMPILE_CACHE_URL" && cp -ru "$KIT_SHARED_CACHE/." "$NEURON_COMPILE_CACHE_URL"
}
export -f copy_cache
srun --nodes=256 --ntasks=256 --ntasks-per-node=1 bash -c copy_cache || fail "the compiled graphs cannot be copied to all nodes"
# ----------------------------------------------------------------------------------------------------
# The supervisor counts the attempt (KIT_ATTEMPT), turns Slurm's signals into requests to save and stop, restarts
# failed ranks, here or in another job, and records the end. The keeper, each rank's parent, records how it ended.
cd /shared/kit || fail 'the kit is not visible on this node'
exec /shared/environment/bin/python -I -u /shared/kit/cluster/start.py cluster.slurm.supervisor "$KIT_RUN_DIR" -- \
    srun --nodes=256 --ntasks=256 --ntasks-per-node=1 \
    --cpus-per-task=128 \
    --kill-on-bad-exit=1 --wait=60 --label \
    /shared/environment/bin/python -I -u -S /shared/kit/cluster/start.py cluster.slurm.rank bash -c run_node
