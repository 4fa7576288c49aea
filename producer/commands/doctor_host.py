"""What `rollq doctor` asks of this machine: the weights directory, vLLM, GPUs, the model.

vLLM is imported in a process of its own, as a worker would: the producer never imports it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from producer.commands.common import cut
from producer.commands.doctor import Check, Checks, guarded
from producer.contract.errors import WeightsError
from producer.contract.manifest import Manifest, confined

_IMPORT = "import vllm, torch; print(vllm.__version__, 'torch', torch.__version__)"
_IMPORT_SECONDS = 180
_LOW_DISK = 0.1


def weights_dir(
    root: Path | None, role: str, weights: Mapping[str, str] | None, *, read_all: bool
) -> Checks:
    """`weights` is the queue's hash, None where it is not known; `read_all`: compare digests."""
    if role == "monitor":
        return
    if root is None:
        yield Check("weights dir", "warn", "none is given: no weights can be published or loaded",
                    "--weights-dir or ROLLQ_WEIGHTS_DIR: a directory both sides see")  # fmt: skip
        return
    yield from guarded("weights dir", "make it, and let this user in", lambda: _rights(root, role))
    if weights is None:
        return
    current = weights.get("current", "0")
    if current == "0":
        yield Check("weights", "ok", "none were published: workers serve what they start with")
        return
    todo = "is it the directory that the trainer publishes to, and is it mounted here?"
    yield from guarded("weights", todo, lambda: _current(root, current, weights, read_all))


def _rights(root: Path, role: str) -> Checks:
    if not root.is_dir():
        yield Check("weights dir", "fail", f"{root} is no directory here",
                    "make it, or mount what the other side sees")  # fmt: skip
        return
    list(root.iterdir())
    may = "readable"
    if role == "trainer":
        probe = root / f".rollq-doctor-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
        may = "readable and writable"
    total, _, free = shutil.disk_usage(root)
    words = f"{root} is {may}, {free / 2**30:,.0f} of {total / 2**30:,.0f} GiB free"
    low = role == "trainer" and free < _LOW_DISK * total
    yield Check("weights dir", "warn" if low else "ok", words, "make room" if low else "")


def _current(root: Path, current: str, weights: Mapping[str, str], read_all: bool) -> Checks:
    directory = confined(root, weights.get(f"{current}:path", ""))
    manifest = Manifest.read(directory)
    published = weights.get(f"{current}:digest")
    if manifest.digest != published:
        yield Check("weights", "fail", f"{directory} holds other files than version {current}: "
                    f"digest {manifest.digest}, published was {published}",
                    "publish again; no one else may write there")  # fmt: skip
        return
    size = sum(size for size, _ in manifest.files.values())
    words = f"version {current}: {len(manifest.files)} files, {size / 2**30:,.2f} GiB, digest "
    if not read_all:
        yield Check("weights", "ok", f"{words}of the manifest as published; files not read")
        return
    try:
        manifest.verify(directory)
    except WeightsError as error:
        yield Check("weights", "fail", f"version {current}: {error}", "publish again")
        return
    yield Check("weights", "ok", f"{words}as published")


def vllm() -> Checks:
    if find_spec("vllm") is None:
        yield Check("vllm", "fail", "not installed in this Python",
                    "pip install 'rollq[gpu]' or 'rollq[cpu]', or use --engine sim")  # fmt: skip
        return
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=_IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield Check("vllm", "fail", f"its import did not end within {_IMPORT_SECONDS} s",
                    "try `python -c 'import vllm'` by hand")  # fmt: skip
        return
    lines = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
    last = cut(lines[-1] if lines else f"exit code {ended.returncode}", 200)
    if ended.returncode == 0:
        yield Check("vllm", "ok", f"imports: {last}")
    else:
        yield Check("vllm", "fail", f"its import fails: {last}",
                    "often a torchvision that does not fit the torch: uninstall it")  # fmt: skip


def gpu() -> Checks:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=30)
        found = [line.strip() for line in ended.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.TimeoutExpired):
        found = []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found:
        words = f"{len(found)}: {found[0]}" + (f"; CUDA_VISIBLE_DEVICES={seen}" if seen else "")
        yield Check("gpu", "ok", words)
    else:
        yield Check("gpu", "warn", "nvidia-smi finds none: vLLM's CPU build is for trying out",
                    "install the driver, or run where a GPU is")  # fmt: skip


def model(name: str | None) -> Checks:
    if name is None:
        return
    path = Path(name)
    if not path.exists() and name.count("/") == 1 and not name.startswith((".", "/")):
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        cached = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
        if cached.is_dir():
            yield Check("model", "ok", f"{name} is in the cache {home}")
        else:
            yield Check("model", "warn", f"{name} is no directory here, nor in the cache {home}",
                        "vLLM will download it at start; or give a directory")  # fmt: skip
        return
    yield from guarded("model", "give the directory of a model", lambda: _directory(path))


def _directory(path: Path) -> Checks:
    names = sorted(os.listdir(path))
    missing = [n for n in ("config.json", "tokenizer_config.json") if n not in names]
    weights = [n for n in names if n.endswith((".safetensors", ".gguf"))]
    if "config.json" in missing or not weights:
        yield Check("model", "fail", f"{path} holds no config.json with safetensors files",
                    "give the directory of a model, as save_pretrained writes it")  # fmt: skip
    elif missing:
        yield Check("model", "warn", f"{path} has no tokenizer: text prompts will fail",
                    "save the tokenizer there, or enqueue token ids only")  # fmt: skip
    else:
        size = sum((path / n).stat().st_size for n in weights) / 2**30
        yield Check("model", "ok", f"{path}: {len(weights)} files, {size:,.2f} GiB")
