"""Loads published safetensors into a running vLLM: the transfer engine `rollq_checkpoint`.

It lives in vLLM's worker processes, where `register_weight_transfer` made it known. What it
guarantees: a load takes exactly the tensors, by name and shape, that the checkpoint has
which the engine was started with, or it fails before it touches a weight. vLLM's own
`load_weights` says nothing of a missing third of a fused parameter.

It reads safetensors alone: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_NAMED = 5


@dataclass
class CheckpointInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is agreed beforehand: each update names its directory."""


@dataclass
class CheckpointUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A directory of safetensors files that this process can read."""

    directory: str


class CheckpointWeightTransferEngine(
    WeightTransferEngine[CheckpointInitInfo, CheckpointUpdateInfo]  # type: ignore[misc]
):
    """One update is one directory, read shard by shard."""

    init_info_cls = CheckpointInitInfo
    update_info_cls = CheckpointUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: CheckpointInitInfo) -> None:
        """There is no connection to set up."""

    def start_weight_update(self) -> None:
        """The reload begins in `receive_weights`, once the files are known to be whole."""

    def receive_weights(self, update_info: CheckpointUpdateInfo) -> None:
        files = safetensors_files(Path(update_info.directory))
        tied = tied_modules(self.model)
        check_tensors(
            tensor_shapes(files), tensor_shapes(started_with(self.vllm_config)), tied=bool(tied)
        )
        initialize_layerwise_reload(self.model)
        # A tied head is the embedding; a reload would take it for a tensor of its own.
        self.model.load_weights(_tensors(files, head=not tied))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A tied head got no tensor, so the reload passes it over; on a CPU it has a packed
        # copy of the embedding, which would stay that of the older weights.
        for module in tied_modules(self.model):
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """There is no connection to close."""


def safetensors_files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, else all.

    Raises:
        ValueError: there are none, or the index is none or names one that is not there.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            files = sorted(directory / Path(name).name for name in names)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} is not an index of files: {error!r}") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{directory} lacks {_few(missing)} of its index")
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors file")
    return files


def started_with(vllm_config: Any) -> list[Path]:
    """The checkpoint files of the model that the engine was started with."""
    model = vllm_config.model_config.model
    directory = Path(model)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path(
            snapshot_download(
                model,
                revision=vllm_config.model_config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                allow_patterns=["*.safetensors", "*.safetensors.index.json"],
                local_files_only=True,
            )
        )
    return safetensors_files(directory)


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor, from the headers alone.

    Raises:
        ValueError: a file is truncated or no safetensors, or two hold the same tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in shapes:
                    raise ValueError(f"{file} holds {name} again")
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def check_tensors(
    got: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], *, tied: bool
) -> None:
    """Compare two checkpoints of one model.

    With tied embeddings either may have the output head, or not: it is the embedding.

    Raises:
        ValueError: naming tensors that are missing, unknown or of another shape.
    """
    optional = {name for name in got.keys() ^ wanted.keys() if tied and _is_head(name)}
    problems = []
    if missing := sorted(wanted.keys() - got.keys() - optional):
        problems.append(f"missing {_few(missing)}")
    if unknown := sorted(got.keys() - wanted.keys() - optional):
        problems.append(f"unknown to the model {_few(unknown)}")
    changed = [
        f"{name} of shape {got[name]} for {wanted[name]}"
        for name in sorted(got.keys() & wanted.keys())
        if got[name] != wanted[name]
    ]
    if changed:
        problems.append(f"wrong shape {_few(changed)}")
    if problems:
        raise ValueError("; ".join(problems))


def tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose weight is that of a module before them: an output head, if any."""
    owners: dict[int, torch.nn.Module] = {}
    tied = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.nn.Parameter) or weight.numel() == 0:
            continue
        if owners.setdefault(id(weight), module) is not module:
            tied.append(module)
    return tied


def _is_head(name: str) -> bool:
    return name == "lm_head.weight" or name.endswith(".lm_head.weight")


def _few(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _tensors(files: list[Path], *, head: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with _open(file) as tensors:
            for name in sorted(tensors.keys()):
                if head or not _is_head(name):
                    yield name, tensors.get_tensor(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:
        raise ValueError(f"cannot read {file}: {error}") from error
