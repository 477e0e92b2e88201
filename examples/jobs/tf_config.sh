#!/bin/bash
# TF_CONFIG, as what starts TensorFlow's jobs sets it (Kubeflow's TFJob, Vertex AI, SageMaker, scripts of your own): each process is
# told all addresses and which of them is its own. Here it is set by hand, for processes of this machine:
#
#     examples/jobs/tf_config.sh 2 train.py --epochs 30
#
# The port of the first address has to be free and reachable: there the processes find one another. Others aren't used.

set -euo pipefail
workers=$1
shift

port="${PORT:-29500}"
addresses=""
for ((index = 0; index < workers; index++)); do
  addresses+="${addresses:+, }\"127.0.0.1:$((port + index))\""
done

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

pids=()
for ((index = 0; index < workers; index++)); do
  TF_CONFIG="{\"cluster\": {\"worker\": [$addresses]}, \"task\": {\"type\": \"worker\", \"index\": $index}}" \
    python "$@" &
  pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
done
exit "$status"
