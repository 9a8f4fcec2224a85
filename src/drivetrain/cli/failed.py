"""Print why a command failed, also as JSON."""

from __future__ import annotations

import json
import sys


def failed(message: str, as_json: bool) -> int:
    """Print ``message`` on stderr, and as ``{"error": ...}`` on stdout if that was asked for; return exit code 2."""
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(message, file=sys.stderr)
    return 2
