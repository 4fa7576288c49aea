"""Each Python block of the README runs, against a real server and a worker, as a user would run
it: only the addresses are replaced, and what the reader brings is made up here."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer import RolloutClient
from producer.rewards.job import check_rewards
from producer.server import start_embedded
from tests.integration.pool import ROOT, Process
from tests.servers import require_server
from tests.waiting import wait_until

torch = pytest.importorskip("torch")

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
VERL = ("verl", "verl.experimental", "verl.experimental.agent_loop")


class Meanwhile:
    """Prompts that are different each time they are asked for, and at last none."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)
        self.given = 0

    def __iter__(self) -> Iterator[str]:
        count = self.counts.pop(0) if self.counts else 0
        self.given += count
        return iter([f"prompt {self.given - i}" for i in range(count)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's URL and a weights directory; a simulated worker serves the README's queue."""
    directory = tmp_path_factory.mktemp("readme")
    weights = directory / "weights"
    weights.mkdir()
    with start_embedded(directory / "redis", prefer=require_server("valkey")) as server:
        command = [sys.executable, "-m", "producer.cli", "worker", "--engine", "sim"]
        command += ["--redis", server.url, "--queue", "grpo", "--weights-dir", str(weights)]
        worker = Process(command, directory / "worker.log")
        try:
            with RolloutClient(server.url, "grpo") as client:
                wait_until(lambda: client.status().workers, "the worker serves")
            yield server.url, weights
        finally:
            worker.close()


def run(mark: str, place: tuple[str, Path], **brought: Any) -> dict[str, Any]:
    """Run the block that holds `mark`, with what its reader brings; returns its names."""
    [block] = [b for b in BLOCKS if mark in b]
    url, weights = place
    assert "redis://localhost:6379" in block
    block = block.replace("redis://localhost:6379", url).replace("/shared/weights", str(weights))
    names: dict[str, Any] = dict(brought)
    exec(compile(block, f"README.md: {mark}", "exec"), names)
    return names


def taken(place: tuple[str, Path]) -> int:
    """Groups that were acked so far; none is left."""
    with RolloutClient(place[0], "grpo") as client:
        status = client.status()
    assert (status.ready, status.leased, status.results) == (0, 0, 0)
    return status.stats.get("groups_acked", 0)


class Policy(torch.nn.Module):
    """As small as a model with logits can be."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(512, 512)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        assert input_ids.shape == attention_mask.shape
        return types.SimpleNamespace(logits=self.table(input_ids))


def test_no_block_is_left_out() -> None:
    marks = ("my_loss", "grpo_loss", "AgentLoopOutput", "prompts.jsonl", "def correct")

    assert [[m for m in marks if m in b] for b in BLOCKS] == [[m] for m in marks]


def test_a_reward_function() -> None:
    [block] = [b for b in BLOCKS if "def correct" in b]
    names: dict[str, Any] = {}
    exec(compile(block, "README.md: def correct", "exec"), names)
    rollouts = [types.SimpleNamespace(text=text) for text in ("42 ", "41")]

    assert check_rewards(names["correct"](rollouts, {"answer": "42"}), 2, "correct") == [1.0, 0.0]


def test_the_trainers_loop(place: tuple[str, Path]) -> None:
    before = taken(place)
    seen: list[int] = []

    names = run(
        "my_loss",
        place,
        prompts=Meanwhile(64),
        next_prompts=Meanwhile(64, 5),
        my_loss=lambda batch: seen.append(len(batch)),
        model=Policy(),
    )

    assert seen == [64, 64, 5]
    assert names["step"] == 3
    assert len(names["batch"][0].rollouts[3].response_ids) > 0
    assert taken(place) - before == 133


def test_a_grpo_loss(place: tuple[str, Path]) -> None:
    before = taken(place)
    model = Policy()
    start = model.table.weight.detach().clone()
    numbers = itertools.count()

    names = run(
        "grpo_loss",
        place,
        dataset=[{"prompt": f"say {i}", "answer": i} for i in range(20)],
        # The simulated engine makes the same tokens for each member of a group.
        my_reward=lambda text, row: float(row["answer"] + next(numbers) % 3),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        tokenizer=types.SimpleNamespace(pad_token_id=0),
    )

    assert names["step"] == 2
    assert torch.isfinite(names["loss"])
    assert not torch.equal(model.table.weight, start)
    assert taken(place) - before == 20


def test_a_grpo_loss_of_the_sampling_policy_itself(
    place: tuple[str, Path],
) -> None:
    """Ratios are 1, so it is minus the mean advantage; and what is too old does not count."""
    model = Policy()
    names = run(
        "grpo_loss",
        place,
        dataset=[{"prompt": "x"}],
        my_reward=lambda text, row: 0.0,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        tokenizer=types.SimpleNamespace(pad_token_id=0),
    )
    batch, grpo_loss = names["batch"], names["grpo_loss"]
    padded = batch.to_padded(pad_token_id=0)

    def sampler(input_ids: Any, attention_mask: Any) -> Any:
        """Gives each response token the logprob that it was sampled with."""
        rows, width = input_ids.shape
        length = padded["response_ids"].shape[1]
        logits = torch.full((rows, width, 512), -torch.inf)
        for row in range(rows):
            for at in range(length):
                chosen = logits[row, width - length - 1 + at]
                p = float(np.exp(padded["response_logprobs"][row, at]))
                chosen[:] = float(np.log(max(1 - p, 1e-30) / 511))
                chosen[padded["response_ids"][row, at]] = float(np.log(p))
        return types.SimpleNamespace(logits=logits)

    rewards = [1.0, 0.0, 0.0, 0.0]
    spread = (np.array(rewards) - 0.25) / (np.std(rewards, ddof=1) + 1e-4)
    lengths = padded["response_mask"].sum(1)

    loss = float(grpo_loss(sampler, batch, rewards))
    assert loss == pytest.approx(-(spread * lengths).sum() / lengths.sum(), abs=1e-4)
    stale = float(grpo_loss(sampler, batch, rewards, max_staleness=-1))
    assert stale == 0.0


def test_a_feed_for_verl(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pydantic = pytest.importorskip("pydantic")
    fields: dict[str, Any] = {
        "prompt_ids": (list[int], ...),
        "response_ids": (list[int], ...),
        "response_mask": (list[int], ...),
        "response_logprobs": (list[float] | None, None),
        "num_turns": (int, 0),
        "reward_score": (float | None, None),
        "metrics": (dict[str, float], ...),
        "extra_fields": (dict[str, Any], {}),
    }
    module = types.ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopOutput = pydantic.create_model("AgentLoopOutput", **fields)  # type: ignore[attr-defined]
    for name in VERL:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = taken(place)
    samples: asyncio.Queue[list[Any]] = asyncio.Queue()

    names = run("AgentLoopOutput", place, dataset=["a", "b", "c"])
    asyncio.run(names["feed"](samples))

    groups = [samples.get_nowait() for _ in range(3)]
    assert [len(g) for g in groups] == [4, 4, 4]
    assert all(len(o.response_ids) == len(o.response_logprobs) > 0 for g in groups for o in g)
    assert taken(place) - before == 3


def test_a_batch_job(
    place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}], "id": i} for i in range(7)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = taken(place)

    run("prompts.jsonl", place)
    run("prompts.jsonl", place)  # started again: there is nothing left to do

    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert sorted(a["id"] for a in answers) == list(range(7))
    assert all(a["text"] and not a["error"] for a in answers)
    assert taken(place) - before == 7
