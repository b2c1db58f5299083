"""Chaos: jobs under everything that can go wrong, then the books must balance. `python benchmarks/chaos.py --minutes 20`.

What is run stands in chaos_harness/; `--help` says what there is.
"""

import sys
from pathlib import Path

# Run by its path, Python looks beside this file, where the package of its name is not.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.chaos_harness.command import main  # noqa: E402 - needs the line above

if __name__ == "__main__":
    sys.exit(main())
