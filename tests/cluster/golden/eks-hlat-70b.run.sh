cd /fsx || exit
export KIT_RUN_DIR=/fsx/runs/7b
export MASTER_ADDR=hlat-70b-4a215486-1-node-0-0.hlat-70b-4a215486-1 MASTER_PORT=41000
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
export CCOM_SOCKET_IFNAME=eth0
ulimit -n 131071 || echo 'the limit of open files stays as it is' >&2
# What each rank runs, in the attempt that the first pod has begun or a phase before it.
run_rank() {
    log=${KIT_PHASE-}
    if [ -z "$log" ]; then
        read -r KIT_ATTEMPT <"$KIT_RUN_DIR/logs/attempt" || exit
        log=$(printf "attempt_%02d/" "$KIT_ATTEMPT")
        export KIT_ATTEMPT && mkdir -p "$KIT_RUN_DIR/logs/$log" || exit
    fi
    exec >>"$KIT_RUN_DIR/logs/${log}rank_$(printf %05d "$RANK").log" 2>&1 || exit
    export XLA_USE_BF16=0
    export XLA_DOWNCAST_BF16=1
    export NEURON_RT_STOCHASTIC_ROUNDING_EN=0
    export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=31
    export NEURON_EXPERIMENTAL_COMPRESS_RG=1
    export TORCH_DIST_INIT_BARRIER=0
    python -m kit.train --run /fsx/runs/7b
    code=$?
    if [ "$code" = 78 ] && [ -z "${KIT_PHASE-}" ]; then
        touch "$KIT_RUN_DIR/control/useless"
    fi
    exit "$code"
}
export -f run_rank
# What each pod runs: an agent that starts the ranks of its node.
run_node() {
    "$@" python -m torch.distributed.run --nnodes=256 --node-rank="$JOB_COMPLETION_INDEX" \
        --nproc-per-node=32 \
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python bash -c run_rank
}
# Compile ahead, once for this run; then work from a copy on the node's own disk.
export NEURON_COMPILE_CACHE_URL=/fsx/neuron-compile-cache
if [ ! -e "$KIT_RUN_DIR/compiled" ]; then
    KIT_PHASE=compile_ run_node neuron_parallel_compile || exit
    [ "$JOB_COMPLETION_INDEX" != 0 ] || touch "$KIT_RUN_DIR/compiled"
fi
cp -ru /fsx/neuron-compile-cache/. /var/neuron-compile-cache || exit
export NEURON_COMPILE_CACHE_URL=/var/neuron-compile-cache
# Told to end: all ranks save and stop at the same step.
trap 'python -m cluster.kubernetes stop "$KIT_RUN_DIR"' TERM
# The first pod counts the attempt, also when Kubernetes has started it again.
[ "$JOB_COMPLETION_INDEX" != 0 ] || python -m cluster.kubernetes begin "$KIT_RUN_DIR" default jobset/hlat-70b-4a215486-1 >"$KIT_RUN_DIR/logs/attempt" || exit
run_node &
agent=$!
while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done
# torchrun has a code of its own for whatever its ranks ended with.
[ ! -e "$KIT_RUN_DIR/control/useless" ] || exit 78
[ ! -e "$KIT_RUN_DIR/control/stopped" ] || exit 143
[ "$JOB_COMPLETION_INDEX" != 0 ] || [ "$code" != 0 ] || python -m cluster.kubernetes end "$KIT_RUN_DIR" "$(<"$KIT_RUN_DIR/logs/attempt")"
exit "$code"
