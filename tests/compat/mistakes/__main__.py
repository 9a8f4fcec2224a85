"""Write down what the installed Lightning raises for each mistake: ``python -m tests.compat.mistakes FILE``."""

from __future__ import annotations

import json
import sys

from tests.compat.mistakes.run import outcomes

with open(sys.argv[1], "w") as file:
    json.dump(outcomes(), file, indent=0)
    file.write("\n")
