"""A tiny run as a process of its own, to be killed: python kill_run.py FOLDER STEPS; it resumes where it can."""

import sys
from pathlib import Path

from rl_samples import run_config, small_trainer


def main() -> None:
    """Runs to the end, with a checkpoint after every step."""
    folder = Path(sys.argv[1])
    resume = folder.exists()
    trainer = small_trainer(folder, run_config(train={"steps": int(sys.argv[2])}))
    if resume:
        trainer.resume()
    trainer.run(show_progress=False)
    trainer.close()


if __name__ == "__main__":
    main()
