"""What commands say and return: messages on stderr, documents on stdout, exit codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joulemark.records import Json

EXIT_REFUSED, EXIT_WRONG, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def say(message: str) -> None:
    """Print a message on stderr; text from outside is spelt out."""
    from joulemark.report.escape import printable

    print(f"joulemark: {printable(message)}", file=sys.stderr)


def print_json(document: Json) -> None:
    """Print one strict JSON document on stdout."""
    from joulemark.report.jsonout import dumps

    sys.stdout.write(dumps(document))
