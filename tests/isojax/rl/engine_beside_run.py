"""A lagged run beside real vLLM, then Ctrl-C in a rollout; for test_rl_engine_beside.py, in a session of its own."""

import os
import signal
import sys
import threading
from pathlib import Path

from rl_samples import run_config, small_params, small_policy, small_trainer

import isojax
from isojax.rl.rollout import Sampling

SECONDS_BEFORE = 0.5


def _interrupt() -> None:
    # As a terminal does: to every process of the group.
    os.killpg(0, signal.SIGINT)


def main(scratch: Path) -> None:
    """Trains in `scratch`/run; prints whether the engine may run beside it, and what `generate` raised at the end."""
    isojax.export_policy(scratch / "policy", small_policy(), small_params(), {})
    settings = {"kv_cache_bytes": 8 << 20, "page_size": 16, "max_step_tokens": 64, "separate_process": True}
    engine = isojax.open_engine("vllm", scratch / "policy", **settings)
    trainer = small_trainer(scratch / "run", run_config(rollout={"lag": 1}, train={"steps": 2}), engine)
    print("beside", engine.runs_beside_trainer, flush=True)
    trainer.run(show_progress=False)
    timer = threading.Timer(SECONDS_BEFORE, _interrupt)
    inside = False
    try:
        timer.start()
        # Seconds of work, for as long as it takes.
        while True:
            inside = True
            engine.generate([[3, 4, 5 + at % 8] for at in range(64)], Sampling(max_tokens=28, seed=1))
            inside = False
    except BaseException as error:
        print("raised", type(error).__name__, "in a rollout" if inside else "between rollouts", flush=True)
    trainer.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
