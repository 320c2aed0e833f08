#!/usr/bin/env bash
# Trains on two machines: run this on both, with the address of the machine itself and that of the first machine.
#
#   examples/two_machines.sh 10.77.0.1 10.77.0.1 examples/digits.py      on the first machine
#   examples/two_machines.sh 10.77.0.2 10.77.0.1 examples/digits.py      on the second
#
# docs/machines.md says what else may matter: ports, machines with several networks, threads.
set -euo pipefail
own=$1 first=$2
shift 2
is_host=$([ "$own" = "$first" ] && echo 1 || echo 0)
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
    --rdzv-backend c10d --rdzv-id my-job --rdzv-endpoint "$first:29400" --rdzv-conf "is_host=$is_host" \
    --local-addr "$own" "$@"
