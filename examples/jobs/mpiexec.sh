#!/bin/bash
# Plain mpiexec, without our launcher: on a cluster where mpiexec is what the site supports, or where another tool calls it.
#
#     examples/jobs/mpiexec.sh 4 train.py --epochs 30
#
# `xpdistribute run -n 4 --dry-run train.py` prints such a line for the mpiexec that belongs to your Python.

set -euo pipefail
processes=$1
shift

# The mpiexec has to be that of the MPI library which mpi4py loads: python -m mpi4py --mpi-lib-version says which one that is.
MPIEXEC="${MPIEXEC:-mpiexec}"

# The threads of BLAS in each process: the cores over the processes.
cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores > processes ? cores / processes : 1))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
export OPENBLAS_NUM_THREADS="$OMP_NUM_THREADS" MKL_NUM_THREADS="$OMP_NUM_THREADS"

# What Open MPI 5 needs where it would refuse or be slow; other MPIs don't read these.
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe   # more processes than cores are allowed
export PRTE_MCA_hwloc_default_binding_policy=none             # no process is tied to one core, which its threads would share
if [ "$(id -u)" = 0 ]; then # as in a container
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

exec "$MPIEXEC" -n "$processes" python "$@"
