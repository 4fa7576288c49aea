"""`rollq bench update` runs, and its figures agree with each other."""

from __future__ import annotations

import pytest

from tests.integration.test_bench import bench


def test_from_a_publication_to_the_last_worker() -> None:
    sizes = (1, 3)
    options = ("--workers", "1,3", "--publications", "2", "--samples", "2")
    figures = bench("update", *options)

    for size in sizes:
        of_size = {
            name.removeprefix(f"workers_{size}_").removesuffix("_ms"): value
            for name, value in figures.items()
            if name.startswith(f"workers_{size}_")
        }
        assert 0 < of_size["stopped"] <= of_size["stopped_p99"]
        # A load takes 200 ms, and a pool of several loads in two halves.
        assert of_size["stopped"] + 200 <= of_size["serving"] <= of_size["serving_p99"]
        assert of_size["serving_half"] >= (200 if size == 1 else 400)
    assert len(figures) == 5 * len(sizes)


@pytest.mark.e2e
def test_beside_the_bare_sequence() -> None:
    figures = bench("update", "--engine", "vllm", "--publications", "2")

    assert figures["vllm_idle_ms"] > 0
    ratio = figures["vllm_idle_ms"] / figures["vllm_bare_ms"]
    assert figures["times_bare_idle"] == pytest.approx(ratio)
