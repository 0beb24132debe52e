#!/bin/bash
# Machines of your own as one Ray cluster. Each needs Kitae with ray (pip install 'kitae[cluster]') of the same version,
# and the same files at the same paths: models, data, verifiers of yours, the run folder.
#
#   all machines      export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=…      the same everywhere: openssl rand -hex 32
#   first machine     ./vms.sh head
#   other machines    ./vms.sh join FIRST:6379 [LABELS]        LABELS: accelerator=h200,zone=a
#   first machine     kitae train RECIPE cluster.backend=ray cluster.address=auto cluster.ranks=2 engine.count=4
#
# Both stay in the foreground and end with Ctrl-C, or with the service that starts them. Who knows the token and reaches
# Ray's ports may run programs there, and nothing is encrypted: keep all of it inside a private network.

set -euo pipefail

port=${PORT:-6379}
: "${RAY_AUTH_MODE:?token, or disabled in a network that nobody else is in}"
common=(--block --disable-usage-stats --object-store-memory=100000000) # nothing of Kitae goes through the store

case "${1:-}" in
head)
    exec ray start --head --port="$port" --include-dashboard=false "${common[@]}" ${HOST:+--node-ip-address="$HOST"}
    ;;
join)
    address=${2:?the address of the first machine, HOST:PORT}
    exec ray start --address="$address" "${common[@]}" ${3:+--labels="$3"} ${HOST:+--node-ip-address="$HOST"}
    ;;
*)
    echo "usage: $0 head | join HOST:PORT [LABELS]" >&2
    exit 2
    ;;
esac
