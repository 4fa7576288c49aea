"""A directory of weights: safetensors files and, written last, the manifest that proves them.

Made by the producer's checkpoint transport, verified by every worker before it loads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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

    def verify(self, directory: Path) -> None:
        """Read every file and compare; also warms the page cache.

        Raises:
            WeightsError: a file is missing, of another size, or of another digest.
        """
        for name, (size, digest) in self.files.items():
            path = directory / name
            try:
                found = path.stat().st_size
                if found != size:
                    raise WeightsError(f"{path} has {found} bytes, its manifest says {size}")
                if file_digest(path) != digest:
                    raise WeightsError(f"{path} does not have the digest of its manifest")
            except OSError as error:
                raise WeightsMissing(f"{path} cannot be read: {error.strerror or error}") from error


def file_digest(path: Path) -> str:
    """blake2b of a file's bytes, 32 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def confined(root: Path, relative: str) -> Path:
    """`root / relative`, if that stays under `root`.

    Raises:
        WeightsError: absolute, or it leaves the root, by `..` or by a link.
    """
    path = (root / relative).resolve()
    if Path(relative).is_absolute() or not path.is_relative_to(root.resolve()):
        raise WeightsError(f"weights path {relative!r} leaves the weights directory {root}")
    return path
