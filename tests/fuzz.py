"""How hard hypothesis searches: the same few examples on every run, or ROLLQ_HYPOTHESIS=deep."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_DEEP = os.environ.get("ROLLQ_HYPOTHESIS") == "deep"


def search(examples: int, *, steps: int = 50) -> settings:
    """Settings for a test that tries `examples` in CI, and other ones, 30 times as many, if deep.

    `steps` is the length of a run of a state machine.
    """
    return settings(
        max_examples=examples * 30 if _DEEP else examples,
        stateful_step_count=steps,
        derandomize=not _DEEP,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
    )
