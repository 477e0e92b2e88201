"""``python -m benchmarks``: settles the BLAS threads, then hands over to the command line."""

from __future__ import annotations

import sys

from benchmarks.blas_threads import use_one_blas_thread


def main() -> int:
    """Run the suite; the exit status is 1 where a result was wrong."""
    use_one_blas_thread()
    # BLAS libraries read their number of threads once, when NumPy is loaded: not before this line.
    from benchmarks.command_line import run  # noqa: PLC0415

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
