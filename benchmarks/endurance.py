"""Long trials of the runtime. `python benchmarks/endurance.py takeover`, or interrupts, stops, memory, poison, all.

What is run stands in endurance_trials/; `--help` says what there is.
"""

import sys
from pathlib import Path

# Run by its path, Python looks beside this file, where the package of its name is not.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.endurance_trials.command import main  # noqa: E402 - needs the line above

if __name__ == "__main__":
    sys.exit(main())
