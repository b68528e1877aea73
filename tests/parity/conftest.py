"""The engine helpers live beside the bridge's own tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bridge"))
