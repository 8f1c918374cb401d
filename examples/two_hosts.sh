#!/bin/sh
# A job of two hosts on one machine: two launchers with the variables that SageMaker would set,
# on two loopback addresses, two ranks each. Needs `sm-launch` in the PATH (make demo sees to it).
#
#   sh examples/two_hosts.sh [SCRIPT ARGUMENT ...]
#
# macOS has only 127.0.0.1 up: `sudo ifconfig lo0 alias 127.0.0.2` first.

here=$(cd "$(dirname "$0")/.." && pwd)
script=${1:-$here/train_scripts/train_ddp.py}
[ $# -gt 0 ] && shift

launchers=
for host in 127.0.0.1 127.0.0.2; do
    opt_ml=runs/demo/$host # what /opt/ml is on SageMaker
    rm -rf "$opt_ml"
    mkdir -p "$opt_ml/model" "$opt_ml/output"
    SM_HOSTS='["127.0.0.1", "127.0.0.2"]' \
    SM_CURRENT_HOST=$host \
    SM_NUM_GPUS=0 \
    SM_MODEL_DIR=$opt_ml/model \
    SM_OUTPUT_DIR=$opt_ml/output \
    TRAINING_JOB_NAME=demo \
        sm-launch --train-script "$script" --launcher-nproc-per-node 2 "$@" &
    launchers="$launchers $!"
done
trap 'kill -TERM $launchers' INT TERM

status=0
for launcher in $launchers; do
    wait "$launcher" || status=$?
done
wait # a stop interrupts the first wait: both launchers have their time
if [ $status -eq 0 ]; then
    echo "two hosts trained one model: $(ls runs/demo/127.0.0.1/model/*)"
else
    head -n 2 runs/demo/*/output/failure
fi
exit $status
