"""Ctrl-C in a rollout of real vLLM in a process of its own; for test_interrupted_run.py, in a session of its own."""

import os
import signal
import sys
import threading

from engine_samples import tiny_policy

from contracts import handshake
from isojax import export_policy, open_engine
from isojax.rl.rollout import Sampling

SECONDS_BEFORE = 0.5


def _interrupt() -> None:
    # As a terminal does: to every process of the group.
    os.killpg(0, signal.SIGINT)


def main() -> None:
    """Prints what `generate` raised."""
    policy, params = tiny_policy("bfloat16", tied=True)
    export_policy(sys.argv[1], policy, params, {})
    settings = {"kv_cache_bytes": 8 << 20, "page_size": 16, "max_step_tokens": 64, "separate_process": True}
    engine = open_engine("vllm", sys.argv[1], **settings)
    handshake(engine.contract, engine.report())
    engine.sync(params)
    timer = threading.Timer(SECONDS_BEFORE, _interrupt)
    try:
        timer.start()
        # Seconds of work, for as long as it takes.
        while True:
            engine.generate([[3, 4, 5 + at] for at in range(64)], Sampling(max_tokens=200, seed=1))
    except BaseException as error:
        print("raised", type(error).__name__, flush=True)
    engine.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
