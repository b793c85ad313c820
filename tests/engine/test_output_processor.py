"""The core's reports are made into outputs: kinds, n, stop strings, errors, logprobs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.engine.frontend_harness import byte_level_tokenizer, make_config, rows_of
from vllm.exceptions import Failure, FailureKind
from vllm.outputs import Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, fan_out


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


class Front:
    """An output processor and the core's side of its requests."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        self.inputs = InputProcessor(make_config(extracts=True), tokenizer)

    def add(self, external_id: str = "0", **settings: Any) -> list[str]:
        processed = self.inputs.process(external_id, "hello", SamplingParams(**settings))
        return [child.request_id for child in self.processor.add_request(processed)]

    def send(self, core_id: str, text: str = "", **fields: Any) -> Any:
        tokens = self.tokenizer.encode(text) if text else []
        output = EngineCoreOutput(
            request_id=core_id, new_token_ids=tokens, new_logprobs=rows_of(tokens), **fields
        )
        return self.processor.process_outputs([output])


@pytest.fixture
def front(tokenizer: Any) -> Front:
    return Front(tokenizer)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_kinds(front: Front, kind: RequestOutputKind) -> None:
    (core_id,) = front.add(output_kind=kind, logprobs=1)
    sent = [front.send(core_id, text).request_outputs for text in ("ab", "cd")]
    sent.append(
        front.send(
            core_id,
            "ef",
            finish_reason=FinishReason.LENGTH,
            num_cached_tokens=2,
            kv_transfer_params={"hidden_states_path": "/x"},
        ).request_outputs
    )
    outputs = [output for step in sent for output in step]
    texts = {
        RequestOutputKind.CUMULATIVE: ["ab", "abcd", "abcdef"],
        RequestOutputKind.DELTA: ["ab", "cd", "ef"],
        RequestOutputKind.FINAL_ONLY: ["abcdef"],
    }[kind]
    assert [output.outputs[0].text for output in outputs] == texts
    for output in outputs:
        completion = output.outputs[0]
        assert front.tokenizer.decode(completion.token_ids) == completion.text
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        assert output.finished == (output is outputs[-1]) == completion.finished()
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.num_cached_tokens) == ("0", "hello", 2)
    assert last.kv_transfer_params == {"hidden_states_path": "/x"}
    assert last.outputs[0].finish_reason == "length"
    assert last.outputs[0].cumulative_logprob == pytest.approx(-0.5 * 6)
    assert last.metrics is not None
    assert last.metrics.finished_time is not None
    assert not front.processor.has_unfinished_requests()


def test_stop_string_ends_the_request_in_the_core_first(front: Front) -> None:
    (core_id,) = front.add(stop=["c d"], output_kind=RequestOutputKind.FINAL_ONLY)
    assert front.send(core_id, "ab ").reqs_to_finish == {}
    processed = front.send(core_id, "c def")
    assert processed.reqs_to_finish == {core_id: "c d"}
    assert processed.request_outputs == []
    # A step that was under way brings more; then the core ends it, with the path.
    assert front.send(core_id, "more").reqs_to_finish == {}
    (output,) = front.send(
        core_id,
        finish_reason=FinishReason.STOP,
        stop_reason="c d",
        kv_transfer_params={"hidden_states_path": "/x"},
    ).request_outputs
    completion = output.outputs[0]
    assert completion.text == "ab "
    assert front.tokenizer.decode(completion.token_ids) == "ab c d"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "c d")
    assert output.kv_transfer_params == {"hidden_states_path": "/x"}
    assert output.finished


def test_stop_string_in_the_last_output_needs_no_finishing(front: Front) -> None:
    (core_id,) = front.add(stop="d")
    processed = front.send(core_id, "abcd", finish_reason=FinishReason.LENGTH)
    assert processed.reqs_to_finish == {}
    completion = processed.request_outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("abc", "stop")
    assert completion.stop_reason == "d"


def test_n_completions_come_back_together(front: Front) -> None:
    core_ids = front.add(n=3, seed=10, output_kind=RequestOutputKind.FINAL_ONLY)
    parent = core_ids[0].removeprefix("0_")
    assert core_ids == [f"{k}_{parent}" for k in range(3)]
    assert front.processor.get_num_unfinished_requests() == 1
    outputs = []
    for k in (2, 0, 1):
        outputs += front.send(
            core_ids[k],
            "xyz"[k],
            finish_reason=FinishReason.LENGTH,
            kv_transfer_params={"hidden_states_path": f"/{k}"},
        ).request_outputs
    (output,) = outputs
    assert [one.text for one in output.outputs] == ["x", "y", "z"]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    paths = [one.kv_transfer_params for one in output.outputs]
    assert paths == [{"hidden_states_path": f"/{k}"} for k in range(3)]
    assert output.kv_transfer_params == {"hidden_states_path": "/0"}
    assert output.finished


def test_each_of_n_has_a_seed_of_its_own(front: Front) -> None:
    request = front.inputs.process("0", [1], SamplingParams(n=3, seed=2**64 - 2)).request
    children = fan_out(request)
    assert [child.sampling_params.seed for child in children] == [2**64 - 2, 2**64 - 1, 0]
    assert {child.sampling_params.n for child in children} == {1}
    assert request.sampling_params.n == 3


def test_an_error_ends_one_request_and_is_logged(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    (bad,), (good,) = front.add("bad"), front.add("good", output_kind=RequestOutputKind.DELTA)
    with caplog.at_level(logging.ERROR):
        (output,) = front.send(
            bad,
            finish_reason=FinishReason.ERROR,
            stop_reason="disk is full",
            failure=Failure(FailureKind.DISK_FULL, "disk is full"),
        ).request_outputs
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "error",
        "disk is full",
    )
    assert output.kv_transfer_params is None
    assert bad in caplog.text
    assert "disk is full" in caplog.text
    assert front.send(good, "go on").request_outputs[0].outputs[0].text == "go on"


def test_logprobs_carry_rank_and_text(front: Front) -> None:
    (core_id,) = front.add(logprobs=1, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt_tokens = front.tokenizer.encode("hello")
    rest = rows_of(prompt_tokens[1:])
    front.send(core_id, new_prompt_logprobs=rest)
    (output,) = front.send(core_id, "é", finish_reason=FinishReason.LENGTH).request_outputs
    first, second = front.tokenizer.encode("é")
    top = front.tokenizer.decode([65])
    assert output.outputs[0].logprobs == [
        {first: Logprob(-0.5, 2, "\ufffd"), 65: Logprob(-0.25, 1, top)},
        {second: Logprob(-0.5, 2, "\ufffd"), 65: Logprob(-0.25, 1, top)},
    ]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt_tokens)


def test_aborted_requests_are_forgotten(front: Front) -> None:
    several, other = front.add("a", n=2, temperature=1.0), front.add("b")
    assert front.processor.abort_requests(["a", "unknown"]) == several
    assert front.send(several[0], "x").request_outputs == []
    assert front.processor.abort_requests(other) == other
    assert not front.processor.has_unfinished_requests()


def test_an_extraction_ends_without_a_token(front: Front) -> None:
    (core_id,) = front.add(max_tokens=0)
    (output,) = front.send(
        core_id, finish_reason=FinishReason.LENGTH, kv_transfer_params={"hidden_states_path": "/x"}
    ).request_outputs
    assert list(output.outputs[0].token_ids) == []
    assert output.outputs[0].text == ""
    assert output.kv_transfer_params == {"hidden_states_path": "/x"}
