"""The exported policies that tests on a card run, named by ISOJAX_CARD_POLICIES, separated by colons.

To be imported before JAX starts: an engine shares the card with the trainer. The benchmarks can be imported afterwards.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

FOLDERS = [Path(name) for name in os.environ.get("ISOJAX_CARD_POLICIES", "").split(":") if name]
needs_policies = pytest.mark.skipif(not FOLDERS, reason="ISOJAX_CARD_POLICIES names no exported policy")
