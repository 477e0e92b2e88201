"""The benchmark suite: ``python -m benchmarks --help``.

Each module answers one question with the public API alone, checks the result that it times against
NumPy, and prints its answer in the form that people of the field read. Rivals run in processes of
their own (`benchmarks.rivals`), by turns with ours.
"""
