"""The command lines of `examples.digits` and of the other programs that learn to read."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from strategies import latest_checkpoint


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags as attributes, checked; a wrong one ends the program with what is needed.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.digits", description="Learn to read handwritten digits on several replicas."
    )
    add = parser.add_argument
    strategies = ["one_device", "mirrored", "central_storage", "multi_worker"]
    add("--strategy", choices=strategies, default="mirrored", help="who runs the steps (default mirrored)")
    add(
        "--replicas",
        type=_count,
        metavar="N",
        help="how many share each batch (default 2, one_device 1); with multi_worker, of each process (default 1)",
    )
    add("--epochs", type=_count, default=30, metavar="E", help="passes over the training set (default 30)")
    add("--batch-size", type=_count, default=64, metavar="G", help="examples in a global batch (default 64)")
    add("--optimizer", choices=["adam", "sgd"], default="adam", help="update rule (default adam)")
    add("--learning-rate", type=_rate, metavar="R", help="of the update rule (default adam 0.002, sgd 0.1)")
    add("--dtype", choices=["float32", "float64"], default="float64", help="of numbers (default float64)")
    add("--seed", type=_seed, default=0, metavar="S", help="of first weights and shuffling (default 0)")
    add("--plot", type=_png, default="digits.png", metavar="PATH", help="of the PNG (default digits.png)")
    add(
        "--checkpoint-dir", type=_folder, metavar="DIR", help="save there after each epoch (default: nowhere)"
    )
    add("--resume", action="store_true", help="go on from the latest checkpoint there, if there is one")
    add("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(arguments)
    if options.replicas is None:
        options.replicas = 1 if options.strategy in ("one_device", "multi_worker") else 2
    if options.strategy == "one_device" and options.replicas > 1:
        parser.error(
            f"argument --replicas: got {options.replicas}; one_device runs 1"
            " — choose --strategy mirrored or central_storage"
        )
    _check_checkpoints(parser, options)
    return options


def parse_few(program: str, description: str) -> argparse.Namespace:
    """The flags of a program that has no more than ``replicas`` and ``epochs``.

    Args:
        program: the module's name.
        description: of what it does.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    add = parser.add_argument
    add("--replicas", type=_count, default=2, metavar="N", help="how many share each batch (default 2)")
    add("--epochs", type=_count, default=12, metavar="E", help="passes over the training set (default 12)")
    return parser.parse_args()


def _check_checkpoints(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    folder = options.checkpoint_dir
    if folder is None:
        if options.resume:
            parser.error("argument --resume: needs the folder of the checkpoints — add --checkpoint-dir DIR")
    elif not options.resume and latest_checkpoint(folder) is not None:
        parser.error(
            f"argument --checkpoint-dir: {str(folder)!r} holds checkpoints of another run"
            " — add --resume to go on from the latest, or name another folder"
        )


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; a whole number of at least 1 is needed")


def _seed(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; a whole number of at least 0 is needed")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if 0 < rate < math.inf:
        return rate
    raise argparse.ArgumentTypeError(f"got {text!r}; a number above 0 is needed, 0.01 for example")


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, which is a file; a folder is needed, new or not")
    return path


def _png(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}; a file in a folder that can be written to is needed")
    return path
