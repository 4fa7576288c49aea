"""Publishing weights as files: whole or not at all, and only what is not needed goes away."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from producer import weights as module
from producer.contract.errors import WeightsError
from producer.contract.manifest import MANIFEST, Manifest
from producer.weights import remove_old, write_checkpoint

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def loaded(directory: Path) -> dict[str, Any]:
    """All tensors of a published directory, proved."""
    manifest = Manifest.read(directory)
    manifest.verify(directory)
    tensors: dict[str, Any] = {}
    for name in sorted(manifest.files):
        tensors |= safetensors.load_file(directory / name)
    return tensors


def test_a_state_dict_and_a_module_come_back_the_same(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)

    a, digest_a = write_checkpoint(tmp_path, "q", model, 1)
    b, digest_b = write_checkpoint(tmp_path, "q", model.state_dict(), 2)

    assert digest_a == digest_b
    assert a != b
    found = loaded(tmp_path / a)
    assert set(found) == {"weight", "bias"}
    assert all(torch.equal(found[k], v) for k, v in model.state_dict().items())


def test_tied_and_strided_tensors_are_written_in_full(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "b": base, "row": base[1], "turned": base.T, "rest": base[:, 1:]}

    path, _ = write_checkpoint(tmp_path, "q", state, 1)

    found = loaded(tmp_path / path)
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_tensors_that_are_freed_meanwhile_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    """A gathered tensor may lie where the one before it lay."""

    class Sharded:
        def __init__(self, value: float) -> None:
            self.value = value

        def full_tensor(self) -> Any:
            return torch.full((1000,), self.value)

    path, _ = write_checkpoint(tmp_path, "q", {f"p{i}": Sharded(float(i)) for i in range(9)}, 1)

    found = loaded(tmp_path / path)
    assert [float(found[f"p{i}"][0]) for i in range(9)] == [float(i) for i in range(9)]


def test_large_states_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 1000)
    state = {f"p{i}": torch.full((100,), float(i)) for i in range(5)}  # 400 bytes each

    path, _ = write_checkpoint(tmp_path, "q", state, 1)

    names = sorted(Manifest.read(tmp_path / path).files)
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(torch.equal(loaded(tmp_path / path)[n], t) for n, t in state.items())


def test_a_directory_is_copied_with_its_weights_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    safetensors.save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    root = tmp_path / "root"
    root.mkdir()

    path, _ = write_checkpoint(root, "q", source, 1)

    assert sorted(f.name for f in (root / path).iterdir()) == ["model.safetensors", MANIFEST]
    assert torch.equal(loaded(root / path)["w"], torch.ones(3))


def test_a_directory_that_is_published_already_is_used_as_it_is(tmp_path: Path) -> None:
    path, digest = write_checkpoint(tmp_path, "q", {"w": torch.ones(3)}, 1)

    assert write_checkpoint(tmp_path, "q", tmp_path / path, 2) == (path, digest)
    assert write_checkpoint(tmp_path, "q", str(tmp_path / path), 2) == (path, digest)
    assert len(list((tmp_path / "q").iterdir())) == 1


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "dict is not weights"),
        (5, "int is not weights"),
        ({"w": 5}, "w of the state dict is a int, no tensor"),
        ("/nowhere", "is no directory"),
    ],
    ids=range(4),
)
def test_what_is_no_weights_is_refused_and_leaves_nothing(
    tmp_path: Path, weights: Any, says: str
) -> None:
    with pytest.raises(WeightsError, match=says):
        write_checkpoint(tmp_path, "q", weights, 1)

    assert list((tmp_path / "q").iterdir()) == []


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "root").mkdir()

    with pytest.raises(WeightsError, match="holds no safetensors files"):
        write_checkpoint(tmp_path / "root", "q", tmp_path / "source", 1)
    assert list((tmp_path / "root" / "q").iterdir()) == []


def test_a_mistyped_weights_directory_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="typo does not exist here: mount or make it"):
        write_checkpoint(tmp_path / "typo", "q", {"w": torch.ones(3)}, 1)
    assert list(tmp_path.iterdir()) == []


def test_whoever_sees_a_publication_sees_it_whole(tmp_path: Path) -> None:
    """A reader looks all the while; what has no dot in front of its name is proved at once."""
    writing = threading.Event()
    writing.set()
    seen: set[str] = set()

    def read() -> None:
        while writing.is_set():
            for directory in (tmp_path / "q").glob("[!.]*"):
                if directory.name not in seen:
                    loaded(directory)
                    seen.add(directory.name)

    (tmp_path / "q").mkdir()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            for step in range(20):
                write_checkpoint(tmp_path, "q", {f"w{step}": torch.ones(10_000)}, step)
        finally:
            writing.clear()
        reader.result()

    assert seen
    assert not list((tmp_path / "q").glob(".*"))


# clean-up


def publish(root: Path, count: int, queue: str = "q") -> dict[str, str]:
    """Versions 1 to `count`, made an hour apart; returns the level with their paths."""
    level = {"current": str(count), "last_good": str(count)}
    for version in range(1, count + 1):
        path, _ = write_checkpoint(root, queue, {"w": torch.full((1,), float(version))}, version)
        os.utime(root / path, (3600 * version, 3600 * version))
        level[f"{version}:path"] = path
    return level


def left(root: Path, level: dict[str, str]) -> list[int]:
    paths = {int(name.split(":")[0]): path for name, path in level.items() if ":" in name}
    return [version for version, path in sorted(paths.items()) if (root / path).is_dir()]


def test_clean_up_spares_current_last_good_and_what_is_in_use(tmp_path: Path) -> None:
    level = publish(tmp_path, 7)
    level["last_good"] = "5"

    remove_old(tmp_path, "q", level, in_use=[2, -1, 0])

    assert left(tmp_path, level) == [2, 5, 7]


def test_clean_up_spares_what_was_made_just_before_the_newest(tmp_path: Path) -> None:
    level = publish(tmp_path, 5)
    newest = 3600 * 5
    os.utime(tmp_path / level["3:path"], (newest - 30, newest - 30))

    remove_old(tmp_path, "q", level, in_use=[])

    assert left(tmp_path, level) == [3, 5]


def test_clean_up_touches_nothing_but_what_was_made_here(tmp_path: Path) -> None:
    other = publish(tmp_path, 3, queue="other")
    level = publish(tmp_path, 3)
    mine = tmp_path / "q" / "mine"
    outside = tmp_path / "base-model"
    for directory in (mine, outside):
        directory.mkdir()
        os.utime(directory, (0, 0))
    level["1:path"], published = "base-model", level["1:path"]

    remove_old(tmp_path, "q", level, in_use=[])

    assert left(tmp_path, other) == [1, 2, 3]
    assert mine.is_dir()
    assert outside.is_dir()
    assert not (tmp_path / published).exists()


def test_clean_up_of_nothing_is_nothing(tmp_path: Path) -> None:
    remove_old(tmp_path, "q", {}, in_use=[])
