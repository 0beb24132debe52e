#!/bin/bash
# A run on a Slurm allocation: a Ray node on each machine, the controller on the first.
#
#   sbatch --nodes=4 --gpus-per-node=8 slurm.sh RECIPE cluster.ranks=8 engine.count=24 run.dir=/shared/runs
#
# Kitae with ray must be on the PATH of every machine, and files at the same paths. A job that was requeued goes on with
# its run: sbatch … slurm.sh resume RUN

#SBATCH --job-name=kitae
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:INT@120

set -euo pipefail

port=${PORT:-6379}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r host _ < <(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address)
common=(--block --disable-usage-stats --object-store-memory=100000000) # nothing of Kitae goes through the store

trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \
    ray start --head --node-ip-address="$host" --port="$port" --include-dashboard=false "${common[@]}" &

for _ in $(seq 60); do # the others can only join what is there
    (: > "/dev/tcp/$host/$port") 2>/dev/null && break
    sleep 1
done

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$first" \
        ray start --address="$host:$port" "${common[@]}" &
fi

command=train
[ "${1:-}" = resume ] && command=resume && shift
# Machines come up one after the other: patience is how long places are waited for. A job that is about to end gets
# Ctrl-C two minutes before, and saves a checkpoint.
kitae "$command" "$@" cluster.backend=ray cluster.address="$host:$port" cluster.patience="${PATIENCE:-300}" &
run=$!
trap 'kill -INT $run' INT TERM
while true; do # a signal ends the wait, not the run
    wait $run && status=0 || status=$?
    kill -0 $run 2>/dev/null || exit $status
done
