"""A directory of weights: safetensors files and, written last, the manifest that proves them.

Made by the producer's checkpoint transport, verified by every worker before it loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from producer.contract.digest import file_digest
from producer.contract.errors import WeightsError, WeightsMissing

MANIFEST = "rollq-manifest.json"
_FORMAT = 1
_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Manifest:
    """`files`: name -> (bytes, digest), the digest as `file_digest` makes it."""

    files: Mapping[str, tuple[int, str]]

    @property
    def digest(self) -> str:
        """One digest for the whole set; equal files give an equal one."""
        lines = "".join(f"{name} {digest}\n" for name, (_, digest) in sorted(self.files.items()))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def write(self, directory: Path) -> None:
        files = {n: {"bytes": size, "digest": digest} for n, (size, digest) in self.files.items()}
        text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
        (directory / MANIFEST).write_text(text)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises WeightsError: none there (yet), or not one."""
        path = directory / MANIFEST
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise WeightsError(f"{path} is larger than {_MAX_BYTES} bytes")
            wire = json.loads(path.read_text())
            if wire["format"] != _FORMAT:
                raise WeightsError(f"{path} has format {wire['format']}, known is {_FORMAT}")
            files = {str(n): (int(f["bytes"]), str(f["digest"])) for n, f in wire["files"].items()}
        except OSError as error:
            raise WeightsMissing(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{path} is not a manifest: {error}") from error
        for name in files:
            if name != PurePosixPath(name).name or not name.endswith(".safetensors"):
                raise WeightsError(f"{path} names {name!r}: only safetensors files beside it count")
        if not files:
            raise WeightsError(f"{path} names no files")
        return cls(files)

    def check_sizes(self, directory: Path) -> None:
        """Raises WeightsError: a file is missing or of another size. Reads none."""
        for name, (size, _) in self.files.items():
            path = directory / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise _missing(path, error) from error
            if found != size:
                raise WeightsError(f"{path} has {found} bytes, its manifest says {size}")

    def verify(self, directory: Path, digest: Callable[[Path], str] = file_digest) -> None:
        """Compare sizes, and each file's digest, as `digest` says it, or by reading it.

        Raises:
            WeightsError: a file is missing, of another size, or of another digest.
        """
        self.check_sizes(directory)
        for name, (_, wanted) in self.files.items():
            path = directory / name
            try:
                found = digest(path)
            except OSError as error:
                raise _missing(path, error) from error
            if found != wanted:
                raise WeightsError(f"{path} does not have the digest of its manifest")


def _missing(path: Path, error: OSError) -> WeightsMissing:
    return WeightsMissing(f"{path} cannot be read: {error.strerror or error}")


def confined(root: Path, relative: str) -> Path:
    """`root / relative`, if that stays under `root`.

    Raises:
        WeightsError: absolute, or it leaves the root, by `..` or by a link.
    """
    path = (root / relative).resolve()
    if Path(relative).is_absolute() or not path.is_relative_to(root.resolve()):
        raise WeightsError(f"weights path {relative!r} leaves the weights directory {root}")
    return path
