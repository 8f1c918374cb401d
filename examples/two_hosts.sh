#!/bin/sh
# A job of two hosts on one machine: two launchers with the variables that SageMaker would set,
# on two loopback addresses, two ranks each, on CPU. Needs `sm-launch` in the PATH (make demo
# sees to it). What is /opt/ml on SageMaker is runs/demo/HOST in the current folder. Without a
# script it draws ants and bees and trains a small ResNet18 with them.
#
#   sh examples/two_hosts.sh [SCRIPT ARGUMENT ...]

here=$(cd "$(dirname "$0")/.." && pwd)
if [ $# -eq 0 ]; then
    python3 "$here/examples/draw_pictures.py" runs/demo/pictures || exit
    set -- "$here/train_scripts/train_hymenoptera.py" --data runs/demo/pictures \
        --weights none --epochs 5 --batch-size 8 --lr 0.01 --lr-step 3 --image-size 64 \
        --checkpoint-dir ''
fi
script=$1
shift

# Two of these at once must not meet each other.
: "${LAUNCHER_RDZV_PORT:=$((20000 + $$ % 9000))}" "${LAUNCHER_START_TIMEOUT:=60}"
: "${LAUNCHER_PEER_PORT:=$((LAUNCHER_RDZV_PORT + 1))}"
export LAUNCHER_RDZV_PORT LAUNCHER_PEER_PORT LAUNCHER_START_TIMEOUT

launchers=
for host in 127.0.0.1 127.0.0.2; do
    opt_ml=runs/demo/$host
    mkdir -p "$opt_ml/model" "$opt_ml/output"
    rm -f "$opt_ml/model/model.pt" "$opt_ml/output/failure" "$opt_ml"/output/data/*.png
    SM_HOSTS='["127.0.0.1", "127.0.0.2"]' \
    SM_CURRENT_HOST=$host \
    SM_NUM_GPUS=0 \
    CUDA_VISIBLE_DEVICES= \
    SM_MODEL_DIR=$opt_ml/model \
    SM_OUTPUT_DIR=$opt_ml/output \
    SM_OUTPUT_DATA_DIR=$opt_ml/output/data \
    TRAINING_JOB_NAME=demo-$$ \
        sm-launch --train-script "$script" --launcher-nproc-per-node 2 "$@" &
    launchers="$launchers $!"
done
trap 'kill -TERM $launchers' INT TERM

status=0
for launcher in $launchers; do
    wait "$launcher" || status=$?
done
wait # a stop interrupts the waiting above, and both launchers have their time
for host in 127.0.0.1 127.0.0.2; do
    failure=runs/demo/$host/output/failure
    [ -f "$failure" ] && echo "$failure:" && head -n 2 "$failure"
done
first=$PWD/runs/demo/127.0.0.1
if [ $status -eq 0 ] && [ -f "$first/model/model.pt" ]; then
    for picture in "$first"/output/data/*.png; do
        [ -f "$picture" ] && echo "To look at: $picture"
    done
    echo "Two hosts have trained one model: $first/model/model.pt"
fi
exit $status
