"""`isojax train`: a run from a TOML file, in a folder of its own, or one continued."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from isojax.cli.exit_codes import INTERRUPTED
from isojax.rl.assemble import assemble
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
    config = load_config(arguments.config)
    resume = arguments.resume is not None
    if resume:
        folder = RunFolder(Path(arguments.resume)) if arguments.resume else latest_run(arguments.runs, config.name)
    else:
        folder = new_run(arguments.runs, config.name)
    trainer = assemble(config, config_folder=arguments.config.parent, folder=folder, resume=resume)
    try:
        trainer.run(show_progress=not arguments.quiet)
    except KeyboardInterrupt:
        # The trainer has saved what it had; this is an orderly end.
        print(
            f"isojax: stopped after step {trainer.progress.step}; continue with: isojax train {arguments.config} "
            f"--resume {folder.path}",
            file=sys.stderr,
        )
        return INTERRUPTED
    finally:
        trainer.close()
    print(run_summary(folder))
    return 0
