"""`isojax train`: a run from a TOML file, in a folder of its own, or one continued."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from contracts.errors import IsojaxError
from isojax.cli.exit_codes import INTERRUPTED
from isojax.rl.assemble import assemble
from isojax.rl.compilation_cache import use_compilation_cache
from isojax.rl.config_file import load_config
from isojax.rl.report import run_summary
from isojax.rl.run_folder import RunFolder, latest_run, new_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="what to train; see docs/training.md")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders are made (default: runs)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a run exactly: the given folder, or the newest one of the configuration's name",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when all steps are done."""
    # JAX would take most of a card at its first use, and the engine needs its share of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config = load_config(arguments.config)
    use_compilation_cache(config.train.compilation_cache, arguments.config.parent)
    resume = arguments.resume is not None
    if resume:
        folder = RunFolder(Path(arguments.resume)) if arguments.resume else latest_run(arguments.runs, config.run_name)
    else:
        folder = new_run(arguments.runs, config.run_name)
    # A scheduler ends a job with SIGTERM; it is as good a reason to stop in order as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        trainer = assemble(config, config_folder=arguments.config.parent, folder=folder, resume=resume)
    except IsojaxError:
        # A refused run never began, and its folder would take the name of the next one.
        if not resume:
            shutil.rmtree(folder.path)
        raise
    try:
        trainer.run(show_progress=not arguments.quiet)
    except KeyboardInterrupt:
        # The trainer has saved what it had; this is an orderly end.
        step, again = trainer.checkpoints.latest(), f"isojax train {arguments.config} --resume {folder.path}"
        then = f"after step {step}; continue with: {again}" if step else "before the first step was saved"
        print(f"isojax: stopped {then}", file=sys.stderr)
        return INTERRUPTED
    finally:
        trainer.close()
    print(run_summary(folder))
    return 0
