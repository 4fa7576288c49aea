"""What a worker may be told; the command line and ROLLQ_ variables fill it."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from producer.contract.errors import InvalidSample
from producer.contract.keys import check_group_id


def default_name() -> str:
    """A name that no other worker has, also after a restart on the same host."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Times in seconds, sizes in tokens.

    Attributes:
        checkpoint_tokens, checkpoint_seconds: tokens are stored when a sample made so many,
            or the oldest unstored one is so old: what a killed worker costs at most.
        reserve_tokens: what a claimed sample is expected to make still, for the KV cache.
        max_samples: samples held at once; 0 means as many as the engine runs.
        grace_seconds: for a drain; the process ends after it in any case.
        stall_seconds: without an engine step while samples are in it, the worker gives up.
        fetch_seconds: for published files to be seen here before they count as missing.
        load_seconds: for one weight load, after which the worker gives up.
        metrics_host, metrics_port: where /metrics, /livez and /readyz are served; 0: nowhere.
    """

    url: str = field(repr=False)  # it may hold a password
    queue: str = "default"
    name: str = field(default_factory=default_name)
    weights_dir: Path | None = None
    checkpoint_tokens: int = 64
    checkpoint_seconds: float = 5.0
    reserve_tokens: int = 256
    max_samples: int = 0
    grace_seconds: float = 30.0
    stall_seconds: float = 120.0
    load_seconds: float = 900.0
    fetch_seconds: float = 30.0
    first_token_seconds: float = 10.0
    final_output_seconds: float = 5.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0

    def __post_init__(self) -> None:
        check_group_id(self.name, "worker name")
        for name in ("checkpoint_tokens", "checkpoint_seconds", "grace_seconds", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidSample(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("max_samples", "reserve_tokens", "fetch_seconds"):
            if getattr(self, name) < 0:
                raise InvalidSample(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.metrics_port <= 65535:
            raise InvalidSample(f"metrics_port must be 0 to 65535, not {self.metrics_port}")
