"""What surrounds a vLLM engine: our plug-in in its processes, its flags, its end.

`register_weight_transfer` is an entry point of `vllm.general_plugins` and so runs in every
vLLM process of an environment that has rollq: vLLM is imported only where it is needed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producer.contract.errors import EngineError

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

#: The name of our transfer engine in vLLM's registry.
WEIGHT_TRANSFER_BACKEND = "rollq_checkpoint"
#: Names the process whose end ends the engine.
_OWNER = "ROLLQ_ENGINE_OWNER"
_OWN_FLAGS = ("--model", "--weight-transfer-config", "--stream-interval")
_KILLED_SECONDS = 5.0


def register_weight_transfer() -> None:
    """Make `rollq_checkpoint` known to vLLM in this process; any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_TRANSFER_BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER_BACKEND, "workers.engines.vllm_weights", "CheckpointWeightTransferEngine"
    )
    owner = multiprocessing.parent_process()
    if owner is not None and os.environ.get(_OWNER) == str(owner.pid):
        # Ctrl-C goes to the whole process group: the core would end before its worker has
        # handed back the samples in it.
        os.setpgrp()
        _end_with(owner.sentinel)


def _end_with(sentinel: int) -> None:
    """End this engine core when the worker that owns it dies.

    vLLM's core outlives a parent that was killed, and keeps the GPU's memory.
    """

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rollq-owner", daemon=True).start()


def engine_args_from_cli(model: str, argv: Sequence[str]) -> AsyncEngineArgs:
    """vLLM's own flags, with our defaults for the CPU and for logprobs.

    Raises:
        EngineError: an unknown flag, a bad value, or a flag that rollq sets itself.
    """
    set_environment()
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise EngineError(f"vLLM's flags: {message}")

    for arg in argv:
        flag = arg.partition("=")[0].partition(".")[0].replace("_", "-")
        if flag in _OWN_FLAGS:
            raise EngineError(f"vLLM's flags: {flag} is set by rollq; leave it out")
    parser = AsyncEngineArgs.add_cli_args(Parser(prog="rollq worker MODEL", allow_abbrev=False))
    # vLLM's own default is one seed for all, and a group's members on two workers would draw
    # the same random numbers.
    parser.set_defaults(logprobs_mode="processed_logprobs", seed=secrets.randbelow(2**31))
    parser.set_defaults(disable_log_stats=True)  # nothing shows them: the worker has its own
    if current_platform.is_cpu():
        parser.set_defaults(enforce_eager=True)
        if not _has_bf16():
            parser.set_defaults(dtype="float32")
    args = parser.parse_args(list(argv))
    args.model = model
    return AsyncEngineArgs.from_cli_args(args)


def check_plugin() -> None:
    """Refuse a start in which the engine's processes would not know our transfer engine."""
    named = [e for e in entry_points(group="vllm.general_plugins") if e.name == "rollq"]
    if not named:
        raise EngineError(
            "vLLM would not find rollq's weight transfer: the distribution rollq is not "
            "installed in this environment (pip install rollq)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "rollq" not in allowed.split(","):
        raise EngineError(f"VLLM_PLUGINS={allowed!r} leaves out rollq: add it")


def set_environment() -> None:
    """What vLLM reads from the environment, where the user has not set it."""
    # Its own default is half of the memory; a GPU build does not read this.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # A forked core would share this process's sockets, and locks that are held.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ[_OWNER] = str(os.getpid())


def step_counter(count_step: Callable[[], None]) -> Any:
    """A stat logger for vLLM: it hears of every step, also of one that gives no token."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepCounter(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Nothing of the configuration matters."""

        def record(self, *args: Any, **kwargs: Any) -> None:
            count_step()

        def log_engine_initialized(self) -> None:
            """vLLM's own loggers say it."""

    return StepCounter


def leave_out_statistics(llm: Any) -> None:
    """Have a new `AsyncLLM` keep no times of tokens and requests, nor Prometheus metrics.

    It would although told not to, for the step counter is a logger of statistics; a fifth of
    what its part in the worker's process costs.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    llm.log_stats = llm.output_processor.log_stats = False
    manager = llm.logger_manager
    manager.stat_loggers = [
        logger for logger in manager.stat_loggers if not isinstance(logger, PrometheusStatLogger)
    ]


def _has_bf16() -> bool:
    """Whether bfloat16 is fast here: on x86 it needs AVX-512's instructions for it."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "bf16" in flags.split()


def descendants(processes: Iterable[Any]) -> list[Any]:
    """`psutil` handles of processes and all below them; safe against reused ids."""
    import psutil

    found = []
    for process in processes:
        try:
            parent = psutil.Process(process.pid)
            found += [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def end_processes(processes: list[Any], seconds: float) -> None:
    """Wait for processes to end and kill those that do not."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_KILLED_SECONDS)
