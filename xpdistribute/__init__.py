"""The command ``xpdistribute``: what it finds on a machine, and how fast the library is there.

The library itself is in the packages `strategies`, `variables` and `collectives`. The command stands beside them and not in one of
them, so that it starts without loading NumPy: ``doctor`` has to work where NumPy doesn't, and ``bench`` settles NumPy's threads
before it is loaded.
"""
