"""The manifest: proves a directory of weights, and never leads out of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from producer.contract.digest import file_digest
from producer.contract.errors import WeightsError
from producer.contract.manifest import MANIFEST, Manifest, confined


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Two files and their manifest."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode() * 10)
    files = {f"{n}.safetensors": (10, file_digest(tmp_path / f"{n}.safetensors")) for n in "ab"}
    Manifest(files).write(tmp_path)
    return tmp_path


def test_what_is_written_is_read_and_proved(weights: Path) -> None:
    manifest = Manifest.read(weights)

    manifest.verify(weights)
    assert {name: size for name, (size, _) in manifest.files.items()} == {
        "a.safetensors": 10,
        "b.safetensors": 10,
    }
    assert all(len(digest) == 32 for _, digest in manifest.files.values())


def test_equal_files_have_an_equal_digest_in_any_order(weights: Path) -> None:
    manifest = Manifest.read(weights)
    turned = Manifest(dict(reversed([*manifest.files.items()])))
    other = Manifest({**manifest.files, "a.safetensors": (10, "0" * 32)})

    assert turned.digest == manifest.digest
    assert other.digest != manifest.digest
    assert Manifest({"c.safetensors": manifest.files["a.safetensors"]}).digest != manifest.digest


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.write_bytes(b"a" * 9), "has 9 bytes, its manifest says 10"),
        (lambda file: file.write_bytes(b"x" * 10), "does not have the digest"),
        (lambda file: file.unlink(), "cannot be read: No such file"),
    ],
    ids=["truncated", "changed", "missing"],
)
def test_damage_is_found_and_named(weights: Path, damage: Any, says: str) -> None:
    damage(weights / "b.safetensors")

    with pytest.raises(WeightsError, match=f"b.safetensors {says}"):
        Manifest.read(weights).verify(weights)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a manifest"),
        ("[]", "is not a manifest"),
        ("5", "is not a manifest"),
        ('{"files": {}}', "is not a manifest"),
        ('{"format": 2, "files": {}}', "has format 2, known is 1"),
        ('{"format": 1, "files": {}}', "names no files"),
        ('{"format": 1, "files": []}', "is not a manifest"),
        ('{"format": 1, "files": {"a.safetensors": 5}}', "is not a manifest"),
        ('{"format": 1, "files": {"a.safetensors": {"bytes": "x", "digest": ""}}}', "is not a"),
        ("\xff\xfe", "is not a manifest"),
        ("[" * 100_000, "is not a manifest"),
    ],
    ids=range(11),
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / MANIFEST).write_bytes(text.encode("latin-1"))

    with pytest.raises(WeightsError, match=says):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "./a.safetensors"),
        *("a.bin", "a.safetensors.pkl", "..", "", "a\0.safetensors", "a\n.safetensors"),
        "\ud800.safetensors",
    ],
)
def test_a_manifest_names_only_weights_beside_it(tmp_path: Path, name: str) -> None:
    files = {name: {"bytes": 1, "digest": "0" * 32}}
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1, "files": files}))

    with pytest.raises(WeightsError, match="only safetensors files beside it count"):
        Manifest.read(tmp_path)


def test_what_was_published_is_there_and_nothing_beside_it(weights: Path) -> None:
    manifest = Manifest.read(weights)
    manifest.expect(manifest.digest, weights)

    with pytest.raises(WeightsError, match="published was 0000"):
        manifest.expect("0" * 32, weights)
    (weights / "c.safetensors").touch()
    with pytest.raises(WeightsError, match=r"c\.safetensors', which its manifest does not name"):
        manifest.expect(manifest.digest, weights)


def spoil(file: Path, kind: str) -> None:
    file.rename(file.with_name("elsewhere"))
    if kind == "link":
        file.symlink_to(file.with_name("elsewhere"))
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize("name", ["a.safetensors", MANIFEST])
def test_only_files_of_their_own_are_read(weights: Path, name: str, kind: str) -> None:
    """Through a link a publication could lead out of the root, and a pipe has no end."""
    spoil(weights / name, kind)

    with pytest.raises(WeightsError, match=f"{name} is a link or a special file"):
        Manifest.read(weights).verify(weights)


def test_no_manifest_yet_is_said(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        Manifest.read(tmp_path)


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(WeightsError, match="is larger than"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("path", ["a", "a/b", "./a", "a/../b"])
def test_a_path_below_the_root_is_taken(tmp_path: Path, path: str) -> None:
    assert confined(tmp_path, path) == (tmp_path / path).resolve()


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "/etc", "loop/x", "a\0b", "\ud800"])
def test_a_path_that_leaves_the_root_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(WeightsError, match=r"leaves the weights directory|cannot be read"):
        confined(tmp_path, path)


def test_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)

    with pytest.raises(WeightsError, match="leaves the weights directory"):
        confined(root, "link")
    with pytest.raises(WeightsError, match="leaves the weights directory"):
        confined(root, str(root))
