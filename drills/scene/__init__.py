"""What the drills share: hosts in network namespaces, lenders, a load that checks every byte, and
the row that a drill prints.
"""

import sys
from pathlib import Path

# The hosts' namespaces, and the helpers of scripts, are those of the benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "bench"))

# The path must be right first.
from common.bench import AQUIFER, PYTHON, Failed, run, wait  # noqa: E402,F401
