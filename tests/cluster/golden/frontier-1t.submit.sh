#!/bin/bash
# frontier-1t: runs 3,072 ranks on 384 nodes of frontier, each with
#   ["/shared/environment/bin/python", "-P", "-m", "kit.train", "--run", "/shared/runs/frontier-1t"]
# Submit from the run directory, which needs a folder logs: sbatch submit.sh
# ----------------------------------------------------------------------------------------------------
#SBATCH --job-name=frontier-1t
#SBATCH --account=abc123
#SBATCH --partition=batch
#SBATCH --constraint=nvme
#SBATCH --nodes=384
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=12:00:00
#SBATCH --output=logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
#SBATCH --network=disable_rdzv_get
# ----------------------------------------------------------------------------------------------------
fail() { echo "kit: $*" >&2; exit 1; }
export KIT_RUN_DIR=/shared/runs/frontier-1t
export PATH=/shared/environment/bin:"$PATH"
KIT_LOADED=${LOADEDMODULES-}
is_loaded() {
    [ -z "${LMOD_CMD-}${MODULES_CMD-}" ] && [ -n "${LOADEDMODULES+set}" ] || return 0
    [ "$LOADEDMODULES" != "$KIT_LOADED" ] || [[ :$LOADEDMODULES == *":$1"* ]] || return 1
    KIT_LOADED=$LOADEDMODULES
}
{ module load PrgEnv-gnu/8.7.0 && is_loaded PrgEnv-gnu/8.7.0; } || fail 'the module PrgEnv-gnu/8.7.0 cannot be loaded'
{ module load cpe/26.03 && is_loaded cpe/26.03; } || fail 'the module cpe/26.03 cannot be loaded'
{ module load miniforge3/23.11.0-0 && is_loaded miniforge3/23.11.0-0; } || fail 'the module miniforge3/23.11.0-0 cannot be loaded'
{ module load rocm/7.1.1 && is_loaded rocm/7.1.1; } || fail 'the module rocm/7.1.1 cannot be loaded'
{ module load rccl-net-plugin && is_loaded rccl-net-plugin; } || fail 'the module rccl-net-plugin cannot be loaded'
{ module load craype-accel-amd-gfx90a && is_loaded craype-accel-amd-gfx90a; } || fail 'the module craype-accel-amd-gfx90a cannot be loaded'
export OMP_NUM_THREADS=7
export PYTHONUNBUFFERED=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export FI_CXI_RDZV_PROTO=alt_read
export NCCL_NET=OFI
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export GLOO_SOCKET_IFNAME=hsn0
# Lines of site.slurm.setup. One that fails ends the script, unless it ends with `|| true`.
KIT_DEPTH=${#BASH_SOURCE[@]}
trap 'KIT_CODE=$?; [ ${#BASH_SOURCE[@]} != "$KIT_DEPTH" ] || { trap - EXIT; echo "kit: setup: ${KIT_LINE[0]} failed with code $KIT_CODE" >&2; exit 1; }' ERR
trap 'echo "kit: setup: ${KIT_LINE[0]} ended the shell with code $?" >&2; exit 1' EXIT
KIT_LINE=($'export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH" # since cpe is not the default one')
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH"  # since cpe is not the default one
trap - ERR EXIT
# Where the ranks meet: the first node of the job.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -xm 1 '[[:alnum:]._-]\+')
[ -n "$MASTER_ADDR" ] || fail "scontrol names no host in $SLURM_JOB_NODELIST"
export MASTER_ADDR MASTER_PORT=$((20000 + (SLURM_JOB_ID + 97 * ${SLURM_RESTART_COUNT:-0}) % 10000))
# The Python environment: one copy to each node's own disk, instead of one read of every file by every rank.
export KIT_ENVIRONMENT="/mnt/bb/$USER/environment"
unpack_environment() {
    cd "$KIT_ENVIRONMENT" && tar -xf environment.tar && { [ ! -e bin/conda-unpack ] || bin/conda-unpack; }
}
export -f unpack_environment
srun --nodes=384 --ntasks=384 --ntasks-per-node=1 mkdir -p "$KIT_ENVIRONMENT" \
    || fail "$KIT_ENVIRONMENT cannot be made on all nodes"
sbcast --force /lustre/orion/abc123/environment.tar "$KIT_ENVIRONMENT/environment.tar" \
    || fail "the environment cannot be sent to all nodes"
srun --nodes=384 --ntasks=384 --ntasks-per-node=1 bash -c unpack_environment \
    || fail "the environment cannot be unpacked on all nodes"
export PATH="$KIT_ENVIRONMENT/bin:$PATH"
# ----------------------------------------------------------------------------------------------------
# What each rank runs.
run_rank() {
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
    export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=8
    printf -v log '%s/logs/attempt_%02d/rank_%05d.log' "$KIT_RUN_DIR" "$KIT_ATTEMPT" "$RANK"
    [ "$RANK" != 0 ] || exec >>"$log" 2>&1 || exit
    # Lines of site.slurm.task_setup. One that fails ends the script, unless it ends with `|| true`.
    KIT_DEPTH=${#BASH_SOURCE[@]}
    trap 'KIT_CODE=$?; [ ${#BASH_SOURCE[@]} != "$KIT_DEPTH" ] || { trap - EXIT; echo "kit: task_setup: ${KIT_LINE[0]} failed with code $KIT_CODE" >&2; exit 1; }' ERR
    trap 'echo "kit: task_setup: ${KIT_LINE[0]} ended the shell with code $?" >&2; exit 1' EXIT
    KIT_LINE=($'export MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID-$SLURM_LOCALID"')
    export MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID-$SLURM_LOCALID"
    KIT_LINE=($'export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"')
    export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
    KIT_LINE=($'mkdir -p "$MIOPEN_USER_DB_PATH"')
    mkdir -p "$MIOPEN_USER_DB_PATH"
    trap - ERR EXIT
    cd /shared/work || exit
    exec python -P /shared/kit/cluster/start.py kit.train --run /shared/runs/frontier-1t
}
export -f run_rank
# ----------------------------------------------------------------------------------------------------
# The supervisor counts the attempt (KIT_ATTEMPT), turns Slurm's signals into requests to save and stop, restarts
# failed ranks, here or in another job, and records the end. The keeper, each rank's parent, records how it ended.
cd /shared/kit || fail 'the kit is not visible on this node'
exec /shared/environment/bin/python -I -u /shared/kit/cluster/start.py cluster.slurm.supervisor "$KIT_RUN_DIR" -- \
    srun --nodes=384 --ntasks=3072 --ntasks-per-node=8 \
    --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest \
    --kill-on-bad-exit=1 --wait=60 --label \
    python -I -u -S /shared/kit/cluster/start.py cluster.slurm.rank bash -c run_rank
