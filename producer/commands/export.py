"""Rollouts as rows of files: JSON lines, or a directory of parquet files.

What both writers guarantee: when `write` (with `flush`, where it holds something back) has
returned, the groups are on the disk; a process killed at any moment and started again on the
same file leaves no group out, none twice and no half line. Used by `rollq results`, which acks
only what `write` gave back, and never lets more than MOST_UNACKED groups be on the disk unacked.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from producer.contract.errors import InvalidSample
from producer.contract.messages import Rollout, RolloutGroup

#: groups that may lie on the disk and not be acked yet
MOST_UNACKED = 1024

_FIRST_WINDOW = 1 << 20
_FIRST = ("group_id", "index", "group_size", "trainable", "id")


def columns() -> list[str]:
    """The names of a row: those of `producer.Rollout`, the group's first.

    `reward` is a number, or null where the function gave a dict: that is in `reward_parts`, so
    that each column has one type.
    """
    names = [f.name for f in dataclasses.fields(Rollout)]
    names += ["is_cancel", "param_version_start", "param_version_end"]
    names += ["reward_parts", "reward_error"]
    return [*_FIRST, *(n for n in names if n not in _FIRST)]


def rows(group: RolloutGroup) -> list[dict[str, Any]]:
    """A row a rollout, in plain values."""
    return [{name: _cell(name, group, rollout) for name in columns()} for rollout in group.rollouts]


def _cell(name: str, group: RolloutGroup, rollout: Rollout) -> Any:
    if name == "group_size":
        return len(group.rollouts)
    if name == "trainable":
        return group.trainable
    if name == "reward_error":
        return group.reward_error
    if name in ("reward", "reward_parts"):
        in_parts = isinstance(rollout.reward, dict)
        return rollout.reward if in_parts is (name == "reward_parts") else None
    value = getattr(rollout, name)
    if name == "segments":
        return [dataclasses.asdict(s) for s in value]
    return value.tolist() if hasattr(value, "tolist") else value


class Writer(Protocol):
    def write(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Take groups, or none; returns those that are on the disk now, to be acked."""

    def flush(self) -> list[RolloutGroup]:
        """Put on the disk what was held back; returns it."""

    def close(self) -> None: ...


class JsonLines:
    """A line a rollout, appended. For stdout (`-`), a pipe and the like, on the disk means handed
    to the reader."""

    def __init__(self, path: str) -> None:
        self._seen: set[str] = set()
        self._is_file = False
        if path == "-":
            self._file = sys.stdout.buffer
            return
        self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        try:
            self._is_file = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if self._is_file:
                _lock(self._file, path)
                self._seen, end = _complete(Path(path))
                self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise

    def write(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        for group in groups:
            if group.id not in self._seen:
                for row in rows(group):
                    self._file.write(json.dumps(row, default=_plain).encode() + b"\n")
        self._file.flush()
        if self._is_file:
            os.fsync(self._file.fileno())
        return list(groups)

    def flush(self) -> list[RolloutGroup]:
        return []

    def close(self) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()


class Parquet:
    """A directory of files `part-000001.parquet` and so on, each written whole under another
    name, flushed and renamed; a part is closed at `groups` groups or `seconds` after its first.
    """

    def __init__(self, path: str, groups: int, seconds: float) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise InvalidSample(
                "parquet needs pyarrow: pip install 'rollq[parquet]', or use --jsonl"
            ) from None
        self._parquet = pyarrow.parquet
        self._schema = _schema(pyarrow)
        self._directory = Path(path)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = (self._directory / ".lock").open("w")
        try:
            _lock(self._lock, path)
        except BaseException:
            self._lock.close()
            raise
        self._groups, self._seconds = groups, seconds
        self._held: list[RolloutGroup] = []
        self._since = 0.0
        parts = sorted(self._directory.glob("part-*.parquet"))
        self._next = int(parts[-1].stem.removeprefix("part-")) + 1 if parts else 1
        self._seen: set[str] = set()
        if parts:
            # Whoever wrote it may have been killed before the ack of this one part.
            ids = self._parquet.read_table(parts[-1], columns=["group_id"])["group_id"]
            self._seen = set(ids.to_pylist())

    def write(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        if not self._held:
            self._since = time.monotonic()
        self._held += groups
        full = len(self._held) >= self._groups
        return self.flush() if full or time.monotonic() - self._since > self._seconds else []

    def flush(self) -> list[RolloutGroup]:
        held, self._held = self._held, []
        if fresh := [row for g in held if g.id not in self._seen for row in rows(g)]:
            self._write(fresh)
        return held

    def close(self) -> None:
        self._lock.close()

    def _write(self, fresh: list[dict[str, Any]]) -> None:
        import pyarrow

        text = [f.name for f in self._schema if f.type == pyarrow.string()]
        for row in fresh:
            for name in text:
                value = row[name]
                if value is not None and (name == "metadata" or not isinstance(value, str)):
                    row[name] = json.dumps(value, default=_plain)
            for name in ("enqueued_at", "started_at", "finished_at"):
                row[name] = round(row[name] * 1000) or None
        target = self._directory / f"part-{self._next:06d}.parquet"
        unfinished = target.with_name(f".{target.name}")
        table = pyarrow.Table.from_pylist(fresh, schema=self._schema)
        with unfinished.open("wb") as file:
            self._parquet.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(target)
        _sync(self._directory)
        self._next += 1


def _schema(pyarrow: Any) -> Any:
    """Parquet types of the columns; `metadata` and what is not always a text are JSON text."""
    ints, text, when = pyarrow.int32(), pyarrow.string(), pyarrow.timestamp("ms", tz="UTC")
    types = {
        **dict.fromkeys(("prompt_ids", "response_ids", "response_mask"), pyarrow.list_(ints)),
        **dict.fromkeys(("enqueued_at", "started_at", "finished_at"), when),
        **dict.fromkeys(("trainable", "is_cancel"), pyarrow.bool_()),
        **dict.fromkeys(("temperature", "top_p", "reward"), pyarrow.float64()),
        **dict.fromkeys(
            ("index", "group_size", "attempts", "interruptions", "crashes", "recomputed_tokens"),
            ints,
        ),
        **dict.fromkeys(("top_k", "param_version_start", "param_version_end"), ints),
        "versions": pyarrow.list_(ints),
        "response_logprobs": pyarrow.list_(pyarrow.float32()),
        "segments": pyarrow.list_(
            pyarrow.struct(
                [("version", ints), ("tokens", ints), ("worker", text), ("attempt", ints)]
            )
        ),
    }
    return pyarrow.schema([(name, types.get(name, text)) for name in columns()])


def _complete(path: Path) -> tuple[set[str], int]:
    """The last groups of a file of JSON lines, and where the last whole one of them ends.

    What a killed process left behind it, half a line or half a group, was not acked: it comes
    again, and is cut off here. Raises InvalidSample where these are no lines of ours.
    """
    size = path.stat().st_size
    window = _FIRST_WINDOW
    with path.open("rb") as file:
        while True:
            start = max(0, size - window)
            file.seek(start)
            lines = file.read(size - start).splitlines(keepends=True)
            first_whole = 0 if start == 0 else 1
            seen, end = _groups_of(lines[first_whole:], path)
            if start == 0 or len(seen) > MOST_UNACKED:
                return seen, start + sum(map(len, lines[:first_whole])) + end
            window *= 4


def _groups_of(lines: Sequence[bytes], path: Path) -> tuple[set[str], int]:
    """Ids of whole groups, and the bytes up to the end of the last one."""
    seen: set[str] = set()
    at = end = 0
    for line in lines:
        at += len(line)
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            last = row["index"] == row["group_size"] - 1
            group_id = row["group_id"]
        except (ValueError, KeyError, TypeError):
            raise InvalidSample(
                f"{path} holds other lines than those of `rollq results`: name another file"
            ) from None
        if last:
            seen.add(group_id)
            end = at
    return seen, end


def _lock(file: IO[Any], path: str) -> None:
    """For as long as `file` is open. Two writers would each cut off what the other is writing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidSample(f"{path} is being written by another `rollq results`") from None


def _plain(value: Any) -> Any:
    """For json: what metadata may hold beyond JSON's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else str(value)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
