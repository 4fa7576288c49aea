"""What `publish_weights` may be told, and what it reads off a pool while it waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producer import WeightsRejected
from producer.contract.errors import WeightsError
from producer.publish import check_wait, prepare, served
from producer.status import Status, WorkerStatus


def pool(failed: dict[str, str] | None = None, state: str = "new", **versions: int) -> Status:
    """Workers a, b, ... that serve these versions; one at -1 still starts."""
    workers = tuple(
        WorkerStatus(name, max(0, v), -1, "starting" if v < 0 else "serving", 0, 0.0, "")
        for name, v in versions.items()
    )
    weights = {"5:state": state, "5:failed": json.dumps(failed or {}), "5:error": "a: last"}
    return Status(0, 0, 0, 0, 5, 4, workers, {}, weights, {})


@pytest.mark.parametrize(
    ("status", "wait", "enough"),
    [
        (pool(), 1, False),
        (pool(), "all", False),
        (pool(a=4, b=4), 1, False),
        (pool(a=5, b=4), 1, True),
        (pool(a=5, b=4), 2, False),
        (pool(a=5), 2, False),
        (pool(a=5, b=4), "all", False),
        (pool(a=5, b=6), "all", True),
        (pool(a=5, b=-1), "all", True),
        (pool(a=-1), "all", False),
        (pool({"a": "no"}, a=4, b=4), "all", False),
        (pool({"a": "no"}, a=4, b=4, c=5), 1, True),
        (pool({"a": "no"}, a=4, b=4, c=5), 2, False),
        (pool({"a": "no"}, a=4, b=-1, c=5), 2, False),
        (pool({"a": "mended"}, a=5), "all", True),
    ],
)
def test_so_many_serve_it(status: Status, wait: Any, enough: bool) -> None:
    assert served(status, 5, wait) is enough


@pytest.mark.parametrize(
    ("status", "wait", "reasons"),
    [
        (pool({"a": "no"}, a=4, b=5), "all", {"a": "no"}),
        (pool({"a": "no"}, b=5), "all", {"a": "no"}),
        (pool({"a": "no", "b": "neither"}, a=4, b=4, c=-1), "all", {"a": "no", "b": "neither"}),
        (pool({"a": "no"}, a=4, b=5), 2, {"a": "no"}),
        (pool({"a": "no", "b": "neither"}, "bad", c=4), 1, {"a": "no", "b": "neither"}),
    ],
)
def test_what_can_not_be_any_more_is_told_with_reasons(
    status: Status, wait: Any, reasons: dict[str, str]
) -> None:
    with pytest.raises(WeightsRejected) as caught:
        served(status, 5, wait)

    assert (caught.value.version, caught.value.reasons) == (5, reasons)


@pytest.mark.parametrize(
    ("max_updating", "says"),
    [(None, "50%"), (1, "1"), (7, "7"), (0.5, "50%"), (1.0, "100%"), (1 / 3, "33.33333333%")],
)
def test_how_many_may_load_at_once(tmp_path: Path, max_updating: Any, says: str) -> None:
    assert publication(tmp_path, max_updating=max_updating)["max_updating"] == says


@pytest.mark.parametrize("max_updating", [0, -1, 0.0, 1.5, -0.5, True, "2", float("nan")])
def test_how_many_must_be_a_number_or_a_share(tmp_path: Path, max_updating: Any) -> None:
    with pytest.raises(WeightsError, match=f"max_updating={max_updating!r} must be a number of"):
        publication(tmp_path, max_updating=max_updating)

    assert not (tmp_path / "weights" / "q").exists(), "nothing is written before all is checked"


@pytest.mark.parametrize("wait", [None, 1, 8, "all"])
def test_what_may_be_waited_for(wait: Any) -> None:
    check_wait(wait)


@pytest.mark.parametrize("wait", [0, -1, True, 1.5, "some"])
def test_what_can_not_be_waited_for_is_named(wait: Any) -> None:
    with pytest.raises(WeightsError, match=f"wait={wait!r} must be a number of workers from 1"):
        check_wait(wait)


def publication(directory: Path, **changes: Any) -> dict[str, Any]:
    files = directory / "files"
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"weights")
    how = {"step": 0, "policy": "requeue", "deadline_s": 0, "max_updating": None} | changes
    (directory / "weights").mkdir(exist_ok=True)
    return prepare(directory / "weights", "q", files, **how)
