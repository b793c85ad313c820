"""The sampler against twins written token by token, and the independence of rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sample.sampler_harness import make_row, naive_probabilities, run, softmax
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processors import edit_logits
from vllm.v1.sample.logprobs import gather_logprobs
from vllm.v1.sample.metadata import LogitEdits, SamplerRow, SamplingMetadata
from vllm.v1.sample.sampler import Sampler


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_largest_float32_logit_and_changes_nothing() -> None:
    logits = random_logits(5, 37).bfloat16()
    before = logits.clone()
    rows = [make_row(temperature=0.0) for _ in range(5)]
    assert run(logits, rows).sampled_token_ids == logits.float().argmax(dim=1).tolist()
    assert torch.equal(logits, before)


def test_logits_that_kernels_do_not_know() -> None:
    """Models of other packages may have them: another dtype, another layout."""
    for logits in (random_logits(5, 70).double(), random_logits(70, 5).t()):
        rows = [make_row(temperature=0.0) for _ in range(5)]
        assert run(logits, rows).sampled_token_ids == logits.max(dim=1).indices.tolist()


def test_greedy_takes_the_first_of_equals_and_nan_before_all() -> None:
    logits = random_logits(6, 40)
    logits[0, [7, 9, 30]] = 50.0
    logits[1, [3, 20]] = math.nan
    logits[1, 1] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    logits[4, 39] = math.inf
    rows = [make_row(temperature=0.0) for _ in range(6)]
    expected = [7, 3, 0, 0, 39, int(logits[5].argmax())]
    assert run(logits, rows).sampled_token_ids == expected == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.15},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 400, "top_p": 0.3},
    ],
)
def test_frequencies_match_the_naive_distribution(settings: dict[str, Any]) -> None:
    vocab, draws = 11, 4000
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    row = make_row(seed=7, **settings)
    expected = naive_probabilities(logits[0].tolist(), row.sampling_params)
    # One request's generator goes on from draw to draw, as it does from token to token.
    counts = Counter(run(logits, [row]).sampled_token_ids[0] for _ in range(draws))
    for token, probability in enumerate(expected):
        error = abs(counts[token] / draws - probability)
        spread = math.sqrt(probability * (1 - probability) / draws)
        assert error <= 4.5 * spread, (token, counts[token] / draws, probability)


def test_wide_nucleus_is_found_by_sorting_everything() -> None:
    vocab = 3001  # a flat distribution: its nucleus is larger than the first candidates
    logits = random_logits(1, vocab, seed=1, scale=0.01)
    allowed = set(logits[0].argsort(descending=True)[: int(vocab * 0.8)].tolist())
    row = make_row(seed=1, top_p=0.5)
    drawn = {run(logits, [row]).sampled_token_ids[0] for _ in range(300)}
    assert drawn <= allowed
    assert len(drawn) > 200


MIXED_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"top_k": 5},
    {"top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {4: 3.5}, "allowed_token_ids": [4, 9, 1999]},
]


def test_a_row_does_not_depend_on_the_others() -> None:
    vocab = 2003
    logits = random_logits(len(MIXED_SETTINGS), vocab, seed=5).bfloat16()

    def rows(order: list[int]) -> list[Any]:
        return [
            make_row(prompt=[1, 2, 3], output=[5, 5, 9], seed=index + 1, **MIXED_SETTINGS[index])
            for index in order
        ]

    num = len(MIXED_SETTINGS)
    alone = [run(logits[i : i + 1], rows([i])) for i in range(num)]
    for order in (list(range(num)), list(reversed(range(num))), [7, 2, 9, 4]):
        together = run(logits[order], rows(order))
        for place, index in enumerate(order):
            assert together.sampled_token_ids[place] == alone[index].sampled_token_ids[0]
            assert together.logprobs[place] == alone[index].logprobs[0]


def test_a_seed_gives_the_same_series_in_any_batch() -> None:
    vocab = 501
    steps = [random_logits(3, vocab, seed=step) for step in range(6)]

    def series(places: list[int]) -> list[int]:
        mine = make_row(seed=42, temperature=1.0, top_p=0.9)
        tokens = []
        for step, place in zip(steps, places, strict=True):
            others = [make_row(seed=place + i, temperature=1.0) for i in range(2)]
            rows = [*others[:place], mine, *others[place:]]
            batch = torch.stack([step[0] if row is mine else step[1] for row in rows])
            tokens.append(run(batch, rows).sampled_token_ids[place])
        return tokens

    assert series([0] * 6) == series([2, 1, 0, 1, 2, 2])
    assert len(set(series([0] * 6))) > 1


@pytest.mark.parametrize("as_array", [False, True])
def test_penalties_match_the_definition(as_array: bool) -> None:
    vocab = 23
    logits = random_logits(1, vocab, seed=9)
    prompt, output = [3, 4, 4, 22], [5, 4, 5, 5]
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3}
    expected = logits[0].tolist()
    for token in set(prompt + output):
        expected[token] *= 1 / 1.4 if expected[token] > 0 else 1.4
    for token, count in Counter(output).items():
        expected[token] -= 0.7 * count - 0.3
    row = make_row(prompt, output, temperature=0.0, **params)
    if as_array:
        row = replace(row, prompt_token_ids=np.array(prompt), output_token_ids=np.array(output))
    from vllm.v1.sample.logits_processors import edit_logits

    edited = logits[0].clone()
    edit_logits(edited, row)
    torch.testing.assert_close(edited, torch.tensor(expected))
    assert run(logits, [row]).sampled_token_ids == [int(torch.tensor(expected).argmax())]


def test_allowed_bias_bad_words_and_minimum_length() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])

    def greedy(output: list[int] | None = None, **settings: Any) -> int:
        bad = settings.pop("bad", [])
        row = make_row(output=output, temperature=0.0, **settings)
        row.sampling_params.set_bad_words_token_ids(bad)
        row = replace(row, edits=LogitEdits(row.sampling_params))
        return run(logits, [row]).sampled_token_ids[0]

    assert greedy(allowed_token_ids=[2, 4]) == 2
    assert greedy(logit_bias={3: 10.0}) == 3
    assert greedy(bad=[[0]]) == 1
    assert greedy(output=[7, 1], bad=[[7, 1, 0]]) == 1
    assert greedy(output=[1, 7], bad=[[7, 1, 0]]) == 0
    assert greedy(output=[7], bad=[[7, 1, 0]]) == 0
    assert greedy(output=[3, 7, 1], bad=[[7, 1, 0], [1, 1], [2], [9, 9, 9, 9, 3]]) == 3
    assert greedy(stop_token_ids=[0], min_tokens=2) == 1
    assert greedy(output=[1, 1], stop_token_ids=[0], min_tokens=2) == 0
    assert greedy(allowed_token_ids=[3, 4], logit_bias={4: 5.0}, bad=[[3]]) == 4


def test_settings_become_tensors_once() -> None:
    """However many tokens a request samples: a list may have as many ids as the vocabulary."""
    vocab = 5000
    ids, bias = list(range(1, vocab, 2)), {token: 1.0 + token % 3 for token in range(0, vocab, 4)}
    row = make_row(temperature=0.0, allowed_token_ids=ids, logit_bias=bias)
    first = row.edits.on(torch.device("cpu"))
    for seed in range(3):
        logits = random_logits(1, vocab, seed)
        expected = torch.full((vocab,), float("-inf"))
        expected[ids] = logits[0, ids]
        expected[list(bias)] += torch.tensor(list(bias.values()))
        assert run(logits, [row]).sampled_token_ids == [int(expected.argmax())]
        assert all(x is y for x, y in zip(first, row.edits.on(torch.device("cpu")), strict=True))


def test_logprobs_are_of_the_raw_logits() -> None:
    vocab = 50
    logits = random_logits(2, vocab, seed=2)
    rows = [
        make_row(temperature=0.0, logprobs=4, logit_bias={7: 100.0}),
        make_row(seed=3, temperature=0.5, logprobs=-1),
    ]
    output = run(logits, rows)
    assert output.sampled_token_ids[0] == 7
    for index, lists in enumerate(output.logprobs):
        assert lists is not None
        exact = [math.log(p) for p in softmax(logits[index].tolist())]
        order = sorted(range(vocab), key=lambda token: -exact[token])
        k = 4 if index == 0 else vocab
        sampled = output.sampled_token_ids[index]
        assert lists.token_ids == [[sampled, *order[:k]]]
        assert lists.logprobs[0] == pytest.approx([exact[t] for t in [sampled, *order[:k]]])
        assert lists.ranks == [order.index(sampled) + 1]


def test_prompt_logprobs_match_log_softmax() -> None:
    logits = random_logits(7, 33, seed=4).bfloat16()
    targets = torch.tensor([0, 32, 5, 5, 9, 1, 17])
    lists = gather_logprobs(logits, targets, 2).result()
    exact = logits.double().log_softmax(dim=1)
    for row, target in enumerate(targets.tolist()):
        assert lists.token_ids[row][0] == target
        assert lists.logprobs[row][0] == pytest.approx(exact[row, target].item(), abs=1e-5)
        assert lists.ranks[row] == int((exact[row] > exact[row, target]).sum()) + 1
        assert lists.logprobs[row][1] == pytest.approx(exact[row].max().item(), abs=1e-5)
    one = gather_logprobs(logits[3:4], targets[3:4], 2).result()
    assert one.logprobs[0] == lists.logprobs[3]


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, 17] = 0.0
    for settings in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.5}):
        row = make_row(seed=1, **settings)
        assert {run(logits, [row]).sampled_token_ids[0] for _ in range(20)} == {17}


def test_greedy_below_the_smallest_temperature() -> None:
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.7},
        {"temperature": 0.6, "top_k": 9},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.1, "top_k": 12, "top_p": 0.7, "min_p": 0.02},
        {"temperature": 1.1, "repetition_penalty": 1.4, "logit_bias": {3: 5.0}},
    ],
)
def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(
    settings: dict[str, Any],
) -> None:
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(4)) * 3
    rows = [make_row(prompt=[1, 2], logprobs=60, **settings) for _ in range(2)]
    edited = logits.clone()
    for one, row in zip(edited, rows, strict=True):
        edit_logits(one, row)
    metadata = SamplingMetadata.from_rows(rows)
    output = Sampler(reports_processed=True)(logits, metadata).result()
    assert output.sampled_token_ids == Sampler()(logits, metadata_again(rows)).result()[0]
    for index, lists in enumerate(output.logprobs):
        assert lists is not None
        expected = naive_probabilities(edited[index].tolist(), rows[index].sampling_params)
        total = sum(expected)
        for token, logprob in zip(lists.token_ids[0], lists.logprobs[0], strict=True):
            assert math.exp(logprob) == pytest.approx(expected[token] / total, abs=1e-6)


def metadata_again(rows: list[SamplerRow]) -> SamplingMetadata:
    """The same rows with fresh generators."""
    fresh = [replace(row, generator=torch.Generator().manual_seed(0)) for row in rows]
    return SamplingMetadata.from_rows(fresh)


def test_processed_logprobs_of_greedy_rows_are_the_model_s() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(9))
    rows = [make_row(temperature=0.0, logprobs=4)]
    metadata = SamplingMetadata.from_rows(rows)
    processed = Sampler(reports_processed=True)(logits, metadata).result()
    assert processed == Sampler()(logits, metadata).result()
