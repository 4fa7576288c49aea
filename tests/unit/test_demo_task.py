"""The demo's task, learner, audit and chart."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.contract.messages import Rollout, RolloutGroup, Segment
from producer.contract.states import State
from producer.demo import laps
from producer.demo.audit import Audit, VersionProof, rollout_problems, spans_versions
from producer.demo.chart import save_picture, sparkline, text_chart
from producer.demo.display import how_to_look
from producer.demo.learner import Learner, LearnerConfig, advantages
from producer.demo.model import load_model, make_model, misfit
from producer.demo.trainers import write_safetensors
from producer.status import Status

TWO_LAPS_FROM_C = laps.Prompt(laps=2, letter=2)


def ids_of(text: str) -> list[int]:
    return [laps.VOCABULARY.index(word) for word in text.split()]


# the task


def test_vocabulary_holds_specials_numbers_and_letters() -> None:
    assert len(laps.VOCABULARY) == len(set(laps.VOCABULARY)) == 33
    assert laps.VOCABULARY[laps.PAD] == "<pad>"
    assert laps.VOCABULARY[laps.BOS] == "<bos>"
    assert laps.VOCABULARY[laps.EOS] == "<eos>"
    assert laps.VOCABULARY[laps.FIRST_NUMBER] == "1"
    assert laps.VOCABULARY[laps.FIRST_LETTER :] == tuple("abcdef")


def test_prompt_is_three_tokens_and_can_be_read_back() -> None:
    assert TWO_LAPS_FROM_C.ids == ids_of("<bos> 2 c")
    for n, letter in itertools.product((1, 7, 24), range(6)):
        prompt = laps.Prompt(n, letter)
        assert laps.prompt_of(np.array(prompt.ids, np.int32)) == prompt


def test_right_answer_wraps_and_ends() -> None:
    assert laps.right_answer(TWO_LAPS_FROM_C) == ids_of("d e f a b c d e f a b c <eos>")
    longest = laps.right_answer(laps.Prompt(24, 0))
    assert len(longest) == 145 <= laps.MAX_TOKENS


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("d e f a b c d e f a b c <eos>", 1.0),
        ("d e f a b c d e f a b c", 1.0),
        ("<eos>", 0.0),
        ("", 0.0),
        ("d e f a b c <eos>", 6 / 12),
        # The slip costs itself and its successor; what follows on the slip counts again.
        ("d e a b c d e f a b c d <eos>", 11 / 12),
        ("d e 1 a b c d e f a b c <eos>", 10 / 12),
        # Two laps too many: right letters beyond the target earn nothing and dilute.
        ("d e f a b c d e f a b c d e f a b c d e f a b c <eos>", 12 / 24),
        ("c d e f a b c d e f a b <eos>", 11 / 12),
        ("<pad> <bos> 3 <eos>", 0.0),
        ("d e f <eos> a b c", 3 / 12),
    ],
)
def test_reward_by_hand(response: str, expected: float) -> None:
    assert laps.reward(TWO_LAPS_FROM_C, ids_of(response)) == pytest.approx(expected)


def test_reward_takes_any_ids() -> None:
    strange = np.array([-1, 2**31 - 1, 0, 38, 27], np.int32)
    assert laps.reward(TWO_LAPS_FROM_C, strange) == 0.0


def test_right_answers_earn_one_and_nothing_earns_more() -> None:
    rng = np.random.default_rng(1)
    for prompt in laps.draw(rng, 50):
        assert laps.reward(prompt, laps.right_answer(prompt)) == 1.0
        random = rng.integers(0, 33, size=int(rng.integers(0, 160)))
        assert 0.0 <= laps.reward(prompt, random) < 1.0


def test_target_lengths_have_a_long_tail() -> None:
    targets = [prompt.target for prompt in laps.draw(np.random.default_rng(0), 20_000)]
    assert 18 <= np.quantile(targets, 0.5) <= 24
    assert 78 <= np.quantile(targets, 0.95) <= 102
    assert min(targets) == 6
    assert max(targets) == 144
    assert laps.lap_probabilities().sum() == pytest.approx(1.0)


def test_the_same_seed_draws_the_same_questions() -> None:
    first, again, other = (laps.draw(np.random.default_rng(s), 40) for s in (3, 3, 4))
    assert first == again != other


# the model


def test_made_model_fits_the_task_and_one_with_other_words_does_not(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made = make_model(tmp_path / "one", seed=3)
    assert misfit(tmp_path / "one") is None
    loaded = load_model(tmp_path / "one")
    ids = torch.tensor([TWO_LAPS_FROM_C.ids])
    assert torch.equal(made(ids).logits, loaded(ids).logits)
    assert 80_000 < sum(p.numel() for p in made.parameters()) < 100_000
    generation = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == laps.EOS

    tokenizer = tmp_path / "one" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"f"', '"g"'))
    assert "lacks the task's words" in (misfit(tmp_path / "one") or "")
    assert "cannot be read" in (misfit(tmp_path) or "")


# the learner


@dataclasses.dataclass
class Sample:
    prompt_ids: Any
    response_ids: Any
    response_logprobs: Any

    @property
    def response_mask(self) -> Any:
        return np.ones(len(self.response_ids), np.int32)


def tiny_policy() -> Any:
    """A bigram model in a transformers model's clothes: quick, and it can learn the letters."""
    torch = pytest.importorskip("torch")

    class Bigram(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = len(laps.VOCABULARY)
            self.table = torch.nn.Embedding(size, size)
            torch.nn.init.zeros_(self.table.weight)

        def forward(self, input_ids: Any, use_cache: bool = False) -> Any:
            return type("Output", (), {"logits": self.table(input_ids)})

    return Bigram()


def sample(model: Any, prompts: Sequence[laps.Prompt], generator: Any) -> list[Sample]:
    """Ten tokens from the model for each prompt."""
    import torch

    ids = torch.tensor([prompt.ids for prompt in prompts])
    logprobs = []
    with torch.no_grad():
        for _ in range(10):
            policy = torch.log_softmax(model(ids).logits[:, -1], -1)
            token = torch.multinomial(policy.exp(), 1, generator=generator)
            logprobs.append(policy.gather(1, token))
            ids = torch.cat([ids, token], 1)
    logprob = torch.cat(logprobs, 1).numpy()
    return [
        Sample(row[:3].astype(np.int32), row[3:].astype(np.int32), lp)
        for row, lp in zip(ids.numpy(), logprob, strict=True)
    ]


def mean_rewards(lr: float, steps: int) -> list[float]:
    import torch

    model = tiny_policy()
    learner = Learner(model, LearnerConfig(lr=lr, entropy_bonus=0.0, micro_batch_tokens=512))
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    means = []
    for _ in range(steps):
        prompts = [p for p in laps.draw(rng, 12) for _ in range(4)]
        rollouts = sample(model, prompts, generator)
        rewards = np.array(
            [laps.reward(p, r.response_ids) for p, r in zip(prompts, rollouts, strict=True)]
        ).reshape(12, 4)
        learner.step(rollouts, advantages(rewards).ravel())
        means.append(float(rewards.mean()))
    return means


def test_learner_improves_the_reward_and_without_a_rate_leaves_it_flat() -> None:
    learned = mean_rewards(lr=0.4, steps=40)
    assert np.mean(learned[:5]) < 0.05
    assert np.mean(learned[-5:]) > np.mean(learned[:5]) + 0.2
    flat = mean_rewards(lr=0.0, steps=30)
    assert abs(np.mean(flat[-10:]) - np.mean(flat[:10])) < 0.02


def test_advantages_are_centred_in_each_group_and_scaled_over_the_batch() -> None:
    rewards = np.array([[1.0, 0.0], [0.5, 0.5]])
    scaled = advantages(rewards)
    assert scaled == pytest.approx(np.array([[0.5, -0.5], [0.0, 0.0]]) / rewards.std(), rel=1e-4)
    assert not advantages(np.full((3, 4), 0.7)).any()


def test_piecewise_gradients_equal_those_of_one_padded_batch() -> None:
    import torch

    def tables(micro_batch_tokens: int) -> Any:
        model = tiny_policy()
        torch.nn.init.normal_(model.table.weight, generator=torch.Generator().manual_seed(2))
        config = LearnerConfig(lr=0.05, micro_batch_tokens=micro_batch_tokens)
        rng = np.random.default_rng(5)
        rollouts = [
            Sample(
                np.array(laps.Prompt(1, 0).ids, np.int32),
                rng.integers(0, 33, size=length).astype(np.int32),
                np.full(length, -3.0, np.float32),
            )
            for length in (1, 40, 7, 7, 160)
        ]
        metrics = Learner(model, config).step(rollouts, np.linspace(-1, 1, 5))
        assert metrics.tokens == 215
        return model.table.weight.detach(), metrics.loss

    whole, loss = tables(10_000)
    pieces, loss_of_pieces = tables(60)
    assert torch.allclose(whole, pieces, atol=1e-6)
    assert loss == pytest.approx(loss_of_pieces)


def test_ratio_is_taken_against_the_behaviour_logprobs_and_clipped() -> None:
    prompt = np.array(laps.Prompt(1, 0).ids, np.int32)
    uniform = np.float32(-np.log(33))
    on_policy = Sample(prompt, np.array([28, 29]), np.full(2, uniform))
    far_behind = Sample(prompt, np.array([28, 29]), np.full(2, uniform - 1.0))
    config = LearnerConfig(entropy_bonus=0.0)
    assert Learner(tiny_policy(), config).step([on_policy], [1.0]).clipped == 0.0
    metrics = Learner(tiny_policy(), config).step([far_behind], [1.0])
    assert metrics.clipped == 1.0
    assert metrics.grad_norm == 0.0
    assert Learner(tiny_policy(), config).step([far_behind], [-1.0]).grad_norm > 0.0


# the audit


def rollout(**changes: Any) -> Rollout:
    """A sound one: five tokens under versions 2 and 3, interrupted once."""
    fields: dict[str, Any] = {
        "id": "g/0",
        "group_id": "g",
        "index": 0,
        "state": State.FINISHED,
        "finish_reason": "stop",
        "stop_reason": None,
        "error": "",
        "text": "",
        "prompt_ids": np.array([1, 4, 27], np.int32),
        "response_ids": np.array([28, 29, 30, 31, 2], np.int32),
        "response_mask": np.ones(5, np.int32),
        "response_logprobs": np.full(5, -1.0, np.float32),
        "versions": np.array([2, 2, 2, 3, 3], np.int32),
        "segments": (Segment(2, 3, "worker-1", 1), Segment(3, 2, "worker-2", 2)),
        "attempts": 2,
        "interruptions": 1,
        "crashes": 0,
        "recomputed_tokens": 6,
        "logprobs_mode": "processed_logprobs",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "enqueued_at": 1.0,
        "started_at": 2.0,
        "finished_at": 3.0,
    }
    return Rollout(**{**fields, **changes})


def group(member: Rollout) -> RolloutGroup:
    return RolloutGroup(member.group_id, (member,), member.prompt_ids, None)


def test_sound_rollouts_have_no_problems() -> None:
    assert rollout_problems(rollout(), published=3, max_tokens=160) == []
    assert spans_versions(rollout())
    waited = rollout(state=State.CANCELLED, finish_reason="cancelled", interruptions=2)
    assert rollout_problems(waited, published=3, max_tokens=160) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_logprobs": np.full(4, -1.0, np.float32)}, "response_logprobs cover 4"),
        ({"response_mask": np.array([1, 1, 0, 1, 1], np.int32)}, "response_mask hides"),
        ({"versions": np.array([2, 3, 2, 3, 3], np.int32)}, "versions decrease"),
        ({"versions": np.array([2, 2, 2, 2, 3], np.int32)}, "segments disagree"),
        ({"versions": np.array([2, 2, 2, 4, 4], np.int32)}, "not all published"),
        ({"segments": (Segment(2, 3, "worker-1", 1),)}, "segments cover 3"),
        ({"response_logprobs": np.full(5, -np.inf, np.float32)}, "not finite"),
        ({"finish_reason": "length"}, "5 tokens of 160"),
        ({"attempts": 3}, "3 attempts do not go with 1 interruptions"),
        ({"attempts": 1, "interruptions": 0}, "segments are of attempts"),
    ],
)
def test_each_contradiction_in_a_rollout_is_found(changes: dict[str, Any], words: str) -> None:
    problems = rollout_problems(rollout(**changes), published=3, max_tokens=160)
    assert any(words in problem for problem in problems), problems


def status(**changes: Any) -> Status:
    stats = {"samples_enqueued": 1, "finished": 1}
    fields: dict[str, Any] = {
        "ready": 0,
        "leased": 0,
        "dead": 0,
        "results": 0,
        "current": 3,
        "last_good": 3,
        "workers": (),
        "stats": stats,
        "weights": {},
        "config": {},
    }
    return Status(**{**fields, **changes})


def audit_of(*submitted: str) -> Audit:
    audit = Audit(samples=1, max_tokens=160)
    audit.submit(submitted)
    return audit


def test_audit_passes_when_everything_submitted_came_once() -> None:
    audit = audit_of("g")
    audit.receive(group(rollout()), published=3)
    audit.close(status())
    assert audit.ok
    assert audit.line().startswith("audit passed: 1 groups submitted, 0 lost; 1 rollouts")


def test_audit_finds_lost_doubled_and_foreign_groups() -> None:
    lost = audit_of("g", "other")
    lost.receive(group(rollout()), published=3)
    lost.close(status())
    assert not lost.ok
    assert "1 lost" in lost.line()
    doubled = audit_of("g")
    for _ in range(2):
        doubled.receive(group(rollout()), published=3)
    assert doubled.problems == ["group g came twice"]
    foreign = audit_of()
    foreign.receive(group(rollout()), published=3)
    assert foreign.problems == ["group g was never submitted"]


@pytest.mark.parametrize(
    "changes", [{"leased": 1}, {"stats": {"samples_enqueued": 2, "finished": 1}}]
)
def test_audit_compares_with_the_queue(changes: dict[str, Any]) -> None:
    audit = audit_of("g")
    audit.receive(group(rollout()), published=3)
    audit.close(status(**changes))
    assert audit.faults == 1


def test_proof_tells_right_labels_from_wrong_ones() -> None:
    import torch

    model = tiny_policy()
    proof = VersionProof(model)
    made = []
    for version in (2, 3):
        torch.nn.init.normal_(model.table.weight, generator=torch.Generator().manual_seed(version))
        proof.keep(version)
        made.append(torch.log_softmax(model.table.weight.detach(), -1))
    ids = [27, 28, 29, 30, 31, 2]
    logprobs = [
        float(made[v - 2][a, b])
        for v, (a, b) in zip((2, 2, 2, 3, 3), itertools.pairwise(ids), strict=True)
    ]
    right = rollout(response_logprobs=np.array(logprobs, np.float32))
    proof.check([right])
    assert proof.tokens == 5
    assert proof.largest_difference < 1e-5
    assert proof.other_difference > 0.1
    wrong = dataclasses.replace(right, versions=np.array([2, 2, 2, 2, 3], np.int32))
    proof.check([wrong])
    audit = audit_of()
    audit.proved(proof)
    assert audit.faults == 1


# what is shown and written


def test_chart_fits_80_columns() -> None:
    for count in (1, 7, 100, 1000):
        chart = text_chart(np.linspace(0, 1, count).tolist())
        assert max(map(len, chart.splitlines())) <= 80
        assert chart.splitlines()[-1].split() == ["1", str(count)]
    assert len(sparkline([0.5] * 300, 44)) == 44
    assert "no step" in text_chart([])


def test_chart_shows_the_rise() -> None:
    lines = text_chart([0.0] * 35 + [1.0] * 35).splitlines()
    assert lines[0] == " 1.0 │" + " " * 35 + "█" * 35


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert save_picture(tmp_path / "reward.png", [0.1, 0.5], [0.3, 0.4])
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_commands_to_look_name_the_socket_and_hide_the_password() -> None:
    local = how_to_look("unix:///tmp/some%20where/redis.sock", "demo")
    assert "-s '/tmp/some where/redis.sock' HGETALL 'rollq:{demo}:stats'" in local[0]
    remote = how_to_look("redis://:secret@host:6379/2", "demo")
    assert all("secret" not in line for line in remote)


def test_pretended_weights_are_a_safetensors_file(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    write_safetensors(tmp_path / "w.safetensors", "step", np.array([7], "<i4"))
    assert json.dumps(numpy.load_file(tmp_path / "w.safetensors")["step"].tolist()) == "[7]"
