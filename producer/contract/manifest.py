"""A directory of weights: safetensors files and, written last, the manifest that proves them.

Made by the producer's checkpoint transport, verified by every worker before it loads. Only
regular files count: a link could lead out of the weights directory, a pipe would never end.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from producer.contract.digest import file_digest
from producer.contract.errors import WeightsError, WeightsMissing

MANIFEST = "rollq-manifest.json"
_FORMAT = 1
#: enough for thousands of files; JSON takes many times its size when it is read
_MAX_BYTES = 1024 * 1024


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
            if _size(path) > _MAX_BYTES:
                raise WeightsError(f"{path} is larger than {_MAX_BYTES} bytes")
            wire = json.loads(path.read_text())
            if wire["format"] != _FORMAT:
                found = str(wire["format"])[:100]
                raise WeightsError(f"{path} has format {found}, known is {_FORMAT}")
            files = {str(n): (int(f["bytes"]), str(f["digest"])) for n, f in wire["files"].items()}
        except OSError as error:
            raise WeightsMissing(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise WeightsError(f"{path} is not a manifest: {str(error)[:200]}") from error
        except RecursionError as error:
            raise WeightsError(f"{path} is not a manifest: nested too deeply") from error
        for name in files:
            if not _is_plain(name):
                raise WeightsError(
                    f"{path} names {name[:100]!r}: only safetensors files beside it count"
                )
        if not files:
            raise WeightsError(f"{path} names no files")
        return cls(files)

    def expect(self, digest: str, directory: Path) -> None:
        """Raises WeightsError where these are not the files that were published, or not alone."""
        if self.digest != digest:
            raise WeightsError(
                f"{directory} holds files of digest {self.digest}, published was {digest[:32]}"
            )
        for path in directory.glob("*.safetensors"):
            if path.name not in self.files:
                name = path.name[:100]
                raise WeightsError(f"{directory} holds {name!r}, which its manifest does not name")

    def check_sizes(self, directory: Path) -> None:
        """Raises WeightsError: a file is missing or of another size. Reads none."""
        for name, (size, _) in self.files.items():
            path = directory / name
            try:
                found = _size(path)
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


def _is_plain(name: str) -> bool:
    """No path, and nothing that a file system or a log would choke on."""
    return name == PurePosixPath(name).name and name.endswith(".safetensors") and name.isprintable()


def _size(path: Path) -> int:
    """Raises WeightsError for what is no regular file, OSError for what is not there."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise WeightsError(f"{path} is a link or a special file, not a file of its own")
    return found.st_size


def confined(root: Path, relative: str) -> Path:
    """`root / relative`, if that stays under `root`.

    Raises:
        WeightsError: absolute, or it leaves the root, by `..` or by a link.
    """
    try:
        path = (root / relative).resolve()
        if not Path(relative).is_absolute() and path.is_relative_to(root.resolve()):
            return path
    except (ValueError, OSError, RuntimeError) as error:  # a NUL, a loop of links
        raise WeightsError(f"weights path {relative[:200]!r} cannot be read: {error}") from error
    raise WeightsError(f"weights path {relative[:200]!r} leaves the weights directory {root}")
