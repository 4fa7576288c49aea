"""Publishing weights as files: the `checkpoint` transport.

A directory under the weights root gets safetensors files, then the manifest, then its final
name by one rename: whoever sees it sees it whole. Clean-up spares the current, the last good
and every version that a worker serves or loads.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from producer.contract.digest import file_digest
from producer.contract.errors import WeightsError
from producer.contract.manifest import MANIFEST, Manifest

_SHARD_BYTES = 4 * 1024**3
_SPARED_SECONDS = 60.0
#: beside a queue's directories; holds the queue's incarnation and its highest version
_NEWEST = ".newest"
#: names that `_publish` gives; others under the root are the user's
_MADE_HERE = re.compile(r"step-?\d+-[0-9a-f]{8}")


def write_checkpoint(root: Path, queue: str, weights: Any, step: int) -> tuple[str, str]:
    """Write weights under `root/queue` and return (path relative to `root`, digest).

    Args:
        weights: a torch module, a state dict (name in checkpoint form -> tensor; sharded
            DTensors are gathered), or a directory of safetensors files. A directory that
            is already under `root` and has a manifest is used as it is.

    Raises:
        WeightsError: `root` does not exist, nothing to publish, or it is not weights.
    """
    if not root.is_dir():
        raise WeightsError(
            f"the weights directory {root} does not exist here: mount or make it; "
            "it must be the same directory as the workers' --weights-dir"
        )
    (root / queue).mkdir(exist_ok=True)
    if isinstance(weights, str | os.PathLike):
        source = Path(weights).resolve()
        if not source.is_dir():
            raise WeightsError(f"{source} is no directory of safetensors files")
        if source.is_relative_to(root.resolve()) and _has_manifest(source):
            return str(source.relative_to(root.resolve())), Manifest.read(source).digest
        return _publish(root, queue, step, lambda target: _copy(source, target))
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping) or not state:
        raise WeightsError(
            f"{type(weights).__name__} is not weights: give a torch module, a state dict "
            "or a directory of safetensors files"
        )
    return _publish(root, queue, step, lambda target: _save(state, target))


def remove_old(root: Path, queue: str, level: Mapping[str, str], in_use: Iterable[int]) -> None:
    """Remove a queue's directories, made here, that nobody needs any more.

    One made less than a minute before the newest stays in any case: a worker may be about
    to read it and has not said so yet.

    Args:
        level: the hash `weights`. in_use: versions that workers serve or load.
    """
    spared = {level.get("current", "0"), level.get("last_good", "0"), *map(str, in_use)}
    needed = {level.get(f"{version}:path") for version in spared}
    made = {
        d: d.stat().st_mtime
        for d in (root / queue).glob("step*")
        if _MADE_HERE.fullmatch(d.name) and (d / MANIFEST).is_file()
    }
    recent = max(made.values(), default=0.0) - _SPARED_SECONDS
    for directory, at in made.items():
        if at < recent and str(directory.relative_to(root)) not in needed:
            shutil.rmtree(directory, ignore_errors=True)


def newest_noted(root: Path, queue: str, incarnation: str) -> int:
    """The highest version that `note_newest` wrote down; 0 if none, or of a queue before this."""
    try:
        noted, _, version = (root / queue / _NEWEST).read_text().partition(" ")
        return int(version) if noted == incarnation else 0
    except (FileNotFoundError, ValueError):
        return 0


def note_newest(root: Path, queue: str, incarnation: str, version: int) -> None:
    """For a publisher that starts after Redis lost this version and its publisher died: a number
    that was given once must not be given to other weights."""
    if version > newest_noted(root, queue, incarnation):
        unfinished = root / queue / f"{_NEWEST}-{secrets.token_hex(4)}"
        unfinished.write_text(f"{incarnation} {version}")
        _sync(unfinished)
        unfinished.replace(root / queue / _NEWEST)


def _publish(root: Path, queue: str, step: int, write: Any) -> tuple[str, str]:
    target = root / queue / f"step{step}-{secrets.token_hex(4)}"
    unfinished = target.with_name(f".{target.name}")
    unfinished.mkdir()
    try:
        write(unfinished)
        files = {}
        for path in sorted(unfinished.glob("*.safetensors")):
            files[path.name] = (path.stat().st_size, file_digest(path))
            path.chmod(0o644)  # safetensors makes files that only their owner reads
            _sync(path)
        manifest = Manifest(files)
        manifest.write(unfinished)
        _sync(unfinished)
        unfinished.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return str(target.relative_to(root)), manifest.digest


def _copy(source: Path, target: Path) -> None:
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{source} holds no safetensors files")
    for file in files:
        shutil.copyfile(file, target / file.name)


def _save(state: Mapping[str, Any], target: Path) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(state))
    for i, shard in enumerate(shards, 1):
        save_file(shard, target / f"model-{i:05d}-of-{len(shards):05d}.safetensors")


def _shards(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shard: dict[str, Any] = {}
    size = 0
    seen: set[int] = set()
    for name, value in state.items():
        tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not hasattr(tensor, "detach"):
            raise WeightsError(f"{name} of the state dict is a {type(value).__name__}, no tensor")
        tensor = tensor.detach().cpu().contiguous()
        # Tied weights share memory, which safetensors refuses to write.
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen:
            tensor = tensor.clone()
        seen.add(pointer)
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += nbytes
    yield shard


def _has_manifest(directory: Path) -> bool:
    try:
        Manifest.read(directory)
    except WeightsError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
