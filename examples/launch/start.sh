#!/bin/sh
# Starts the replicas of one machine: of a new run, of one that goes on, or of one that was cut off.
#
#   start.sh FOLDER [OPTIONS OF farflung train]
#
# The machines share FOLDER. PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT are
# variables that torchrun reads its options from; DEVICE is that of --device. Where replicas are lost the others go on,
# and a machine that is started again joins them with one replica. The exit code is 0 once the run has ended.
set -eu
run=$1
shift

ended() { [ -e "$run/summary.json" ] && grep -q '"stopped": false' "$run/summary.json"; }

if ended; then exit 0; fi
if [ -e "$run/run.key" ] && farflung worker -- farflung join "$run" --device "${DEVICE:-cpu}"; then
    ended
    exit
fi
if [ -n "$(ls "$run/checkpoints" 2>/dev/null)" ]; then
    set -- --resume "$run" "$@"
else
    if [ -e "$run" ] && [ "${PET_NODE_RANK:-0}" = 0 ]; then mv "$run" "$run.cut-off-$(date +%s)"; fi
    set -- --out "$run" "$@"
fi
torchrun --no-python farflung worker -- farflung train --elastic 1:64 --device "${DEVICE:-cpu}" "$@" || true
ended
