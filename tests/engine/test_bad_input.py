"""Bad input gets an error that says what is wrong, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    greedy,
    random_prompts,
    rows_of,
)
from tests.engine.storage import assert_no_half_files, assert_only_whole_files, names_in
from vllm import LLM, SamplingParams
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput

Checkpoint = Callable[..., Path]
MAX_MODEL_LEN = 96
VOCABULARY = 307
GOOD: PromptType = {"prompt_token_ids": [5, 6, 7]}


def run(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False)


def transfer(**params: Any) -> SamplingParams:
    return greedy(extra_args={"kv_transfer_params": params})


class Serving:
    """An extracting engine, and the rows it gives for one prompt while all is well."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.llm = llm
        self.folder = folder
        self.good_rows = self.rows()

    def rows(self) -> torch.Tensor:
        return rows_of(run(self.llm, [GOOD])[0])

    def check_goes_on(self) -> None:
        assert torch.equal(self.rows(), self.good_rows)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def serving(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: Any
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("storage")
    options = {"allow_custom_save_path": "inside"}
    config = extraction_config([1, 4], folder, **options)
    with engine(checkpoint(request.param), max_model_len=MAX_MODEL_LEN, **config) as llm:
        yield Serving(llm, folder)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [1] * 97}, r"97 tokens long.*max_model_len=96"),
        ({"prompt_token_ids": [1] * 96}, r"96 tokens long.*max_model_len=96.*no room"),
        ({"prompt_token_ids": [1, 307]}, r"Token id 307 is out of vocabulary.*0 to 306"),
        ({"prompt_token_ids": [-1]}, r"Token id -1 is out of vocabulary"),
        ({"prompt_token_ids": [10**40]}, r"out of vocabulary"),
        ({"prompt_token_ids": [3, 1.5]}, r"token id 1\.5 at position 1 .* not an integer"),
        ({"prompt_token_ids": [True]}, r"token id True .* not an integer"),
        ({"prompt_token_ids": "12"}, "has to be a list of integers"),
        ({"prompt_ids": [1]}, "'prompt_ids' is not supported.*'prompt_token_ids'"),
        ({"prompt": 5}, "has to be a string"),
        ({}, 'needs "prompt", "prompt_token_ids" or "prompt_embeds"'),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "'multi_modal_data' is not supported"),
        ("half a character: \ud800", "not valid text"),
        (None, "has to be a list of integers"),
    ],
)
def test_prompts(serving: Serving, prompt: Any, message: str) -> None:
    before = names_in(serving.folder)
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        run(serving.llm, [GOOD, prompt])
    assert names_in(serving.folder) == before
    serving.check_goes_on()


def test_a_prompt_may_fill_the_context_when_nothing_is_generated(serving: Serving) -> None:
    (prompt,) = random_prompts(1, [MAX_MODEL_LEN])
    (output,) = run(serving.llm, [prompt], greedy(0))
    assert rows_of(output).shape == (MAX_MODEL_LEN, 2, 72)
    (shorter,) = run(serving.llm, [{"prompt_token_ids": prompt["prompt_token_ids"][:-1]}])
    assert torch.equal(rows_of(shorter), rows_of(output)[:-1])


def test_without_extraction_something_has_to_be_generated(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), max_model_len=MAX_MODEL_LEN) as llm:
        with pytest.raises(ValueError, match="max_tokens=0"):
            run(llm, [GOOD], greedy(0))
        assert run(llm, [GOOD])[0].finished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"include_output_tokens": "yes"}, "include_output_tokens='yes' must be true or false"),
        ({"include_output_tokens": 1}, "include_output_tokens=1 must be true or false"),
        ({"include_output_token": True}, "did you mean 'include_output_tokens'"),
        ({"hidden_state_path": "x"}, "did you mean 'hidden_states_path'"),
        ({"hidden_states_path": 5}, "hidden_states_path=5 must be a string"),
        ({"hidden_states_path": ""}, "is not the path of a file"),
        ({"hidden_states_path": "a\0b"}, "is not the path of a file"),
        ({"hidden_states_path": "../outside"}, "lies outside shared_storage_path"),
        ({"hidden_states_path": "/outside"}, "lies outside shared_storage_path"),
        ({"hidden_states_path": "a.lock"}, r"names that end in \.lock"),
    ],
)
def test_transfer_params(serving: Serving, params: dict[str, Any], message: str) -> None:
    before = names_in(serving.folder)
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        run(serving.llm, [GOOD, [8, 9]], [greedy(), transfer(**params)])
    serving.llm.llm_engine.settle()
    assert names_in(serving.folder) == before
    serving.check_goes_on()


def test_transfer_params_have_to_be_a_dict() -> None:
    values: list[Any] = [5, [], "x"]
    for value in values:
        with pytest.raises(ValueError, match=r"kv_transfer_params.* has to be a dict"):
            greedy(extra_args={"kv_transfer_params": value})


def test_transfer_params_that_are_nested_deeply(serving: Serving) -> None:
    params: dict[str, Any] = {}
    for _ in range(700):
        params = {"more": params}
    with pytest.raises(ValueError, match=r"kv_transfer_params: .* nested too deeply"):
        run(serving.llm, [GOOD, GOOD], [greedy(), transfer(**params)])
    serving.check_goes_on()


def test_requests_of_one_call_cannot_share_a_path(serving: Serving) -> None:
    """Also when they would run one after the other: the first file would be lost."""
    with pytest.raises(ValueError, match=r"prompt 1: .*is being written by another request"):
        run(serving.llm, [[1], [2]], transfer(hidden_states_path="shared.safetensors"))
    extra = {"kv_transfer_params": {"hidden_states_path": "n.safetensors"}}
    with pytest.raises(ValueError, match=r"prompt 0: .*is being written by another request"):
        run(serving.llm, [[1]], SamplingParams(n=2, max_tokens=1, extra_args=extra))
    # Once the earlier ones are gone the path is free.
    (output,) = run(serving.llm, [[1]], transfer(hidden_states_path="shared.safetensors"))
    assert len(rows_of(output)) == 1
    (again,) = run(serving.llm, [[1, 2]], transfer(hidden_states_path="shared.safetensors"))
    assert len(rows_of(again)) == 2
    serving.check_goes_on()


def test_a_request_id_that_cannot_be_encoded(serving: Serving) -> None:
    with pytest.raises(ValueError, match="request_id is not valid text"):
        serving.llm.llm_engine.add_request("é\ud800", GOOD, greedy())
    serving.check_goes_on()


@pytest.mark.parametrize(
    "request_id", ["../../escape", "/escape", "..", "a\0b", "", "x" * 500, "a/b", "é"]
)
def test_request_ids_never_leave_the_folder(serving: Serving, request_id: str) -> None:
    llm_engine = serving.llm.llm_engine
    llm_engine.add_request(request_id, GOOD, greedy())
    outputs = []
    while llm_engine.has_unfinished_requests():
        outputs += llm_engine.step()
    (output,) = outputs
    assert output.request_id == request_id
    assert output.kv_transfer_params is not None
    path = Path(output.kv_transfer_params["hidden_states_path"])
    assert path.parent == serving.folder
    assert torch.equal(rows_of(output), serving.good_rows)


def test_request_ids_are_strings(serving: Serving) -> None:
    bad: Any = 5
    with pytest.raises(ValueError, match="request_id=5: has to be a string"):
        serving.llm.llm_engine.add_request(bad, GOOD, greedy())
    serving.check_goes_on()


def test_text_needs_a_tokenizer_and_token_ids_do_not(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", tokenizer=False)
    with engine(folder) as llm:
        with pytest.raises(ValueError, match=r"there is no tokenizer \(.*prompt_token_ids"):
            run(llm, ["text"])
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
        with pytest.raises(ValueError, match=r"stop=\['x'\] is found in text"):
            run(llm, [GOOD], SamplingParams(stop="x"))
        (output,) = run(llm, [GOOD], greedy(3))
        assert len(output.outputs[0].token_ids) == 3
        assert output.outputs[0].text == ""


# ---- rows that cannot be right


@pytest.fixture
def spoilt(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint whose token 7 has NaN embeddings, and whose token 9 has zero ones."""
    from safetensors.torch import load_file, save_file

    from tests.models.checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path / "spoilt", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 3] = float("nan")
    weights["model.embed_tokens.weight"][9] = 0
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("chunk", [16, 512])
def test_rows_that_are_nan_or_zero_fail_their_request(
    spoilt: Path, chunk: int, tmp_path: Path
) -> None:
    long = [[11] * 40 + [7] + [12] * 3, [11] * 44]
    prompts: list[Any] = [[1, 2, 3], [1, 7, 3], [9, 4], [4], *long]
    storage = tmp_path / "storage"
    with engine(spoilt, max_num_batched_tokens=chunk, **extraction_config([2, 1], storage)) as llm:
        outputs = run(llm, prompts, greedy(3))
        reasons = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
        assert reasons == [
            ("length", None),
            ("error", "hidden states of token 1, layer 2 are not finite"),
            ("error", "hidden states of token 0, layer 2 are all zero"),
            ("length", None),
            ("error", "hidden states of token 40, layer 2 are not finite"),
            ("length", None),
        ]
        good = [outputs[0], outputs[3], outputs[5]]
        assert_only_whole_files(storage, {path_of(output).name for output in good})
        assert all(output.kv_transfer_params is None for output in outputs if output not in good)
        # What failed is not found by the prefix cache either.
        (again,) = run(llm, [long[0]], greedy(3))
        assert again.outputs[0].finish_reason == "error"
        (whole,) = run(llm, [long[1]], greedy(3))
        assert torch.equal(rows_of(whole), rows_of(outputs[5]))


def test_logits_that_are_not_finite_fail_requests_without_rows(spoilt: Path) -> None:
    """Else they would read as token 0, or as any other."""
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=3, ignore_eos=True)
    with engine(spoilt) as llm:
        for params in (greedy(3), drawn):
            outputs = run(llm, [[1, 2, 3], [1, 7, 3], [4, 4, 7]], params)
            reasons = [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]
            bad = ("error", "logits of token 2 are not finite")
            assert reasons == [("length", None), bad, bad]


def test_zero_embeddings_are_fine_at_layer_zero(spoilt: Path, tmp_path: Path) -> None:
    with engine(spoilt, **extraction_config([0], tmp_path / "storage")) as llm:
        (output,) = run(llm, [[4, 9]])
    assert rows_of(output)[:, 0].abs().sum(-1).bool().tolist() == [True, False]


def path_of(output: RequestOutput) -> Path:
    assert output.kv_transfer_params is not None
    return Path(output.kv_transfer_params["hidden_states_path"])


# ---- a model that raises


@pytest.mark.parametrize("place", ["_copy_blocks", "forward", "end_step", "sample"])
def test_an_exception_in_a_step_ends_its_requests_only(
    place: str, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm_engine = serving.llm.llm_engine
    runner = core_of(serving.llm).executor.worker.model_runner
    before = assert_no_half_files(serving.folder)
    # The first has had its last step, and is being written, when it breaks.
    llm_engine.add_request("done", {"prompt_token_ids": [5, 6, 7]}, greedy(1))
    llm_engine.add_request("broken", {"prompt_token_ids": [8, 9]}, greedy(5))
    outputs = {output.request_id: output for output in llm_engine.step()}
    owners = {"forward": runner.model, "sample": runner.sampler, "end_step": runner.connector}
    owner = owners.get(place, runner)
    monkeypatch.setattr(owner, place, broken)
    llm_engine.add_request("broken too", {"prompt_token_ids": [1] * 30}, greedy(5))
    outputs |= {output.request_id: output for output in llm_engine.step()}
    monkeypatch.undo()
    llm_engine.add_request("after", GOOD, greedy())
    while llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm_engine.step()}
    for request_id in ("broken", "broken too"):
        (completion,) = outputs[request_id].outputs
        assert completion.finish_reason == "error"
        assert completion.stop_reason == "RuntimeError: out of order"
        assert completion.kv_transfer_params is None
    for request_id in ("done", "after"):
        assert torch.equal(rows_of(outputs[request_id]), serving.good_rows)
    whole = {path_of(outputs[request_id]).name for request_id in ("done", "after")}
    assert_only_whole_files(serving.folder, before | whole)
    serving.check_goes_on()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of order")
