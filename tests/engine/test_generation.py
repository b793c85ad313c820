"""Generated tokens: transformers' greedy ones, reproducible random ones, and their text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts
from tests.models.families import MIXERS
from tests.models.oracle import reference_run
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.outputs import Logprob, RequestOutput

Checkpoint = Callable[..., Path]
NUM_TOKENS = 32
PROMPTS = random_prompts(21, [1, 9, 40, 71])


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every choice of every output."""
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def first_tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [choices[0] for choices in tokens_of(outputs)]


def run(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


@torch.no_grad()
def transformers_tokens(folder: Path, prompts: Sequence[dict[str, list[int]]]) -> list[list[int]]:
    """Each prompt alone through ``generate()``, greedy, without an end."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            use_cache=False,  # one forward pass: some recurrent families step in another way
        )
        tokens.append(generated[0, ids.shape[1] :].tolist())
    return tokens


@pytest.mark.parametrize("family", MIXERS)
def test_greedy_tokens_are_transformers(family: str, checkpoint: Checkpoint) -> None:
    # Its indexer scores tokens alike now and then; which of them are read is up to each, so that
    # transformers with and without its cache differ too. Here it reads all.
    options = {"index_topk": 256} if family == "glm_moe_dsa" else {}
    folder = checkpoint(family, **options)
    with engine(folder) as llm:
        outputs = run(llm, PROMPTS, greedy(NUM_TOKENS))
    assert first_tokens(outputs) == transformers_tokens(folder, PROMPTS)
    for output in outputs:
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
        {"max_num_seqs": 1},
        {"long_prefill_token_threshold": 13},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 21},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])
def test_scheduling_options_change_no_token(
    family: str, options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family)
    prompts = PROMPTS + random_prompts(22, [200, 3])
    with engine(folder) as llm:
        expected = first_tokens(run(llm, prompts, greedy(9)))
    with engine(folder, **options) as llm:
        assert first_tokens(run(llm, prompts, greedy(9))) == expected


def test_one_list_of_params_and_mixed_prompts(checkpoint: Checkpoint) -> None:
    prompts = ["a text", [5, 6, 7], {"prompt": "dict"}, {"prompt_token_ids": [8, 9]}]
    params = [greedy(n) for n in (1, 5, 2, 7)]
    with engine(checkpoint("llama")) as llm:
        outputs = run(llm, prompts, params)
        tokenizer: Any = llm.get_tokenizer()
        texts = [list(tokenizer.encode("a text")), list(tokenizer.encode("dict"))]
        assert [o.prompt_token_ids for o in outputs] == [texts[0], [5, 6, 7], texts[1], [8, 9]]
        assert [o.prompt for o in outputs] == ["a text", None, "dict", None]
        assert [len(tokens) for tokens in first_tokens(outputs)] == [1, 5, 2, 7]
        alone = run(llm, [[5, 6, 7]], greedy(5))
        assert first_tokens(alone) == [first_tokens(outputs)[1]]
        (single,) = run(llm, "a text", greedy(1))
        assert first_tokens([single]) == first_tokens(outputs[:1])
        with pytest.raises(ValueError, match="sampling_params has 2 entries for 4 prompts"):
            run(llm, prompts, params[:2])


def test_text_is_the_tokenizers(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama")) as llm:
        tokenizer: Any = llm.get_tokenizer()
        params = greedy(NUM_TOKENS, allowed_token_ids=list(range(256)))
        outputs = run(llm, ["Größe: 12 €", "x"], params)
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            assert output.outputs[0].text == tokenizer.decode(ids)
            assert output.prompt == tokenizer.decode(output.prompt_token_ids)


def test_chat_is_generate_on_the_rendered_template(checkpoint: Checkpoint) -> None:
    conversations: Any = [
        [{"role": "user", "content": "Hello"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        ],
    ]
    with engine(checkpoint("qwen3")) as llm:
        tokenizer: Any = llm.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in (conversations[0], [conversations[1][0], {"role": "user", "content": "Why?"}])
        ]
        chat = llm.chat(conversations, greedy(8), use_tqdm=False)
        generated = run(llm, texts, greedy(8))
        assert [o.prompt_token_ids for o in chat] == [o.prompt_token_ids for o in generated]
        assert first_tokens(chat) == first_tokens(generated)
        (one,) = llm.chat(conversations[0], greedy(8), use_tqdm=False)
        assert first_tokens([one]) == first_tokens(chat[:1])


def close(entry: Logprob, expected: float) -> bool:
    return abs(entry.logprob - expected) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("budget", [512, 24])
def test_logprobs_are_transformers(family: str, budget: int, checkpoint: Checkpoint) -> None:
    """Logprobs of prompt and output tokens, with the prompt in one chunk and in several."""
    folder = checkpoint(family)
    with engine(folder, max_num_batched_tokens=budget) as llm:
        run(llm, PROMPTS, greedy(1))  # what is in the prefix cache must not matter
        outputs = run(llm, PROMPTS[1:], greedy(5, logprobs=3, prompt_logprobs=2))
    for output in outputs:
        prompt = list(output.prompt_token_ids or [])
        choice = output.outputs[0]
        tokens = prompt + list(choice.token_ids)
        expected = reference_run(folder, tokens[:-1]).logits.log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert choice.logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        entries = [*output.prompt_logprobs[1:], *choice.logprobs]
        assert len(entries) == len(tokens) - 1
        for position, entry in enumerate(entries):
            row, token = expected[position], tokens[position + 1]
            assert entry is not None
            assert next(iter(entry)) == token
            assert entry[token].rank == int((row > row[token]).sum()) + 1
            top = row.topk(2 if position < len(prompt) - 1 else 3).indices.tolist()
            assert set(entry) == {token, *top}
            assert all(close(entry[t], row[t].item()) for t in entry)
        total = sum(
            entry[token].logprob
            for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
        )
        assert choice.cumulative_logprob == pytest.approx(total)


def test_random_tokens_are_reproducible(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    random = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    found = []
    for seed, others in ((3, 0), (3, 0), (4, 2)):
        with engine(folder, seed=seed) as llm:
            alone = run(llm, PROMPTS, random)
            crowd = random_prompts(23, [20] * others)
            by_seed = run(llm, [*crowd, PROMPTS[2]], [*[random] * others, seeded])[-1:]
            again = run(llm, PROMPTS, random)
        assert first_tokens(again) != first_tokens(alone)
        found.append((first_tokens(alone), first_tokens(by_seed)))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    # A request's own seed counts more than the engine's and whatever else runs.
    assert found[0][1] == found[2][1]


def test_n_choices_with_a_file_each(checkpoint: Checkpoint, tmp_path: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    found = []
    for part in ("a", "b"):
        config = extraction_config([4], tmp_path / part)
        with engine(checkpoint("qwen3_5"), **config) as llm:
            outputs = run(llm, PROMPTS, params)
        for output in outputs:
            assert [choice.index for choice in output.outputs] == [0, 1, 2]
            transfers = [choice.kv_transfer_params or {} for choice in output.outputs]
            paths = [transfer["hidden_states_path"] for transfer in transfers]
            assert len(set(paths)) == 3
            assert all(Path(path).is_file() for path in paths)
            assert output.kv_transfer_params == transfers[0]
        found.append(tokens_of(outputs))
    assert found[0] == found[1]
    assert all(len(set(map(tuple, choices))) == 3 for choices in found[0])


def test_cumulative_outputs_tell_all_choices(checkpoint: Checkpoint) -> None:
    """However slowly they are taken: cumulative ones are merged."""
    folder = checkpoint("llama")
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    with engine(folder) as offline:
        (expected,) = tokens_of(run(offline, PROMPTS[:1], params))
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_model_len=512))

    async def last_tokens(pause: float) -> list[list[int]]:
        outputs = []
        async for output in llm.generate(PROMPTS[0], params, f"{pause}"):
            outputs.append(output)
            await asyncio.sleep(pause)
        return tokens_of(outputs)[-1]

    async def work() -> list[list[list[int]]]:
        try:
            return [await last_tokens(pause) for pause in (0, 0.05)]
        finally:
            await llm.shutdown()

    assert asyncio.run(work()) == [expected] * 2


def test_temperature_samples_the_models_distribution(checkpoint: Checkpoint) -> None:
    """4,000 draws of one token: frequencies of the likely tokens within five sigmas."""
    folder = checkpoint("llama")
    num_draws = 4000
    with engine(folder, max_num_seqs=1024) as llm:
        params = SamplingParams(temperature=0.7, max_tokens=1, ignore_eos=True)
        outputs = run(llm, [PROMPTS[1]] * num_draws, params)
    logits = reference_run(folder, PROMPTS[1]["prompt_token_ids"]).logits[-1]
    probabilities = (logits / 0.7).softmax(-1)
    drawn = torch.tensor([tokens[0] for tokens in first_tokens(outputs)])
    counts = torch.bincount(drawn, minlength=len(probabilities)).float()
    sigma = (num_draws * probabilities * (1 - probabilities)).sqrt()
    likely = probabilities > 0.005
    assert likely.sum() >= 5
    assert ((counts - num_draws * probabilities).abs() <= 5 * sigma)[likely].all()


def test_priority_decides_who_runs_first(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = run(llm, PROMPTS, greedy(4), priority=[3, 1, 2, 0])
        first_come = run(llm, PROMPTS, greedy(4), priority=[0, 0, 0, 0])
    metrics = [output.metrics for output in outputs]
    ended = [one.finished_time if one and one.finished_time else 0.0 for one in metrics]
    assert sorted(range(4), key=ended.__getitem__) == [3, 1, 2, 0]
    began = [one and one.first_scheduled_time for one in metrics]
    first = [one and one.first_token_time for one in metrics]
    for earlier, later in itertools.pairwise([3, 1, 2, 0]):
        assert began[earlier] < first[earlier] < began[later], "one at a time"
    assert first_tokens(first_come) == first_tokens(outputs)
