"""Benchmarks between the processes of a machine, by turns with other systems and with the limit that a C loop sets."""
