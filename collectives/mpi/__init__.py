"""Collectives between processes by way of MPI, through mpi4py: on one host or on several."""
