"""The worker's side of `rollq bench`: what must import the workers. See `producer/bench`."""

from __future__ import annotations

import os
from typing import TextIO


def own_stdout() -> TextIO:
    """For our lines alone: what vLLM logs goes to stderr from now on."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines
