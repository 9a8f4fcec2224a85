"""Print why a command failed, as text and as JSON."""

from __future__ import annotations

import json
import sys


def failed(message: str, as_json: bool) -> int:
    """Print ``message`` on stderr. With ``as_json``, also print ``{"error": message}`` on stdout. Return the exit code
    2.
    """
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(message, file=sys.stderr)
    return 2
