"""LLM over an engine core that follows a script: order, n, errors, interrupts, chat."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.engine.frontend_harness import FakeCore, byte_level_tokenizer, make_config
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import front_end, llm_engine


class Setup:
    """An LLM whose core says ``text`` to each prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = "one two three"
        self.core = FakeCore(lambda request: self.tokenizer.encode(self.text))
        monkeypatch.setattr(llm_engine, "EngineCore", lambda config: self.core)
        monkeypatch.setattr(front_end, "load_tokenizer", lambda config: (tokenizer, ""))
        monkeypatch.setattr(EngineArgs, "create_engine_config", lambda args: make_config())
        self.llm = LLM("nowhere", seed=3, max_model_len=64)

    def generate(self, prompts: Any, params: Any = None, **kwargs: Any) -> Any:
        return self.llm.generate(prompts, params, use_tqdm=False, **kwargs)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Setup:
    return Setup(monkeypatch, tokenizer)


def test_outputs_come_in_the_order_of_the_prompts(setup: Setup) -> None:
    prompts = [[10 + i] * (1 + i % 3) for i in range(7)]
    outputs = setup.generate(prompts, [SamplingParams(max_tokens=2 + i) for i in range(7)])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished for output in outputs)
    assert outputs[0].outputs[0].text == "one two three"
    ids = [output.request_id for output in outputs]
    assert ids == [str(i) for i in range(7)]
    assert setup.generate("again")[0].request_id == "7"


def test_forms_of_prompts_and_default_settings(setup: Setup) -> None:
    outputs = setup.generate(["hello", [5, 6], {"prompt_token_ids": [7]}, {"prompt": "x"}])
    assert [output.prompt for output in outputs] == ["hello", None, None, "x"]
    params = setup.core.seen[0].sampling_params
    assert (params.temperature, params.max_tokens) == (0.25, 7)
    assert setup.llm.get_default_sampling_params().temperature == 0.25


def test_neither_copied_nor_pickled(setup: Setup) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make one in the process that uses it"):
            copied(setup.llm)
    assert setup.generate("fine")[0].finished


def test_stop_string_and_n(setup: Setup) -> None:
    params = SamplingParams(n=2, seed=1, stop="two", max_tokens=50)
    (output,) = setup.generate("x", params)
    assert [one.text for one in output.outputs] == ["one ", "one "]
    assert {one.stop_reason for one in output.outputs} == {"two"}
    path = output.kv_transfer_params["hidden_states_path"]
    assert path.startswith("/files/0_0-")
    assert path.endswith(".safetensors")
    assert output.num_cached_tokens == 3
    # The core ran no step past the stop string but the one that brought the file.
    assert setup.core.num_steps < len(setup.tokenizer.encode(setup.text))


def test_one_bad_prompt_and_nothing_runs(setup: Setup) -> None:
    with pytest.raises(ValueError, match="prompt 2: the prompt is empty"):
        setup.generate(["a", "b", "", "c"])
    with pytest.raises(ValueError, match="prompt 1: Token id 999"):
        setup.generate([[1], [999]])
    assert setup.core.seen == []
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        setup.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="priority=5: has to be a list"):
        setup.generate("a", priority=5)
    with pytest.raises(ValueError, match="priority has 1 entries"):
        setup.generate(["a", "b"], priority=[1])
    with pytest.raises(ValueError, match="prompt 1: priority='low': has to be a 64-bit integer"):
        setup.generate(["a", "b"], priority=[0, "low"])
    with pytest.raises(ValueError, match="prompt 1: priority=2: has no effect"):
        setup.generate(["a", "b"], priority=[0, 2])
    assert setup.generate([]) == []
    assert setup.generate("fine")[0].finished


def test_a_request_that_the_core_refuses_takes_the_others_back(setup: Setup) -> None:
    setup.core.refuse_id_prefix = "2-"
    with pytest.raises(ValueError, match="prompt 2: it can never fit the pool"):
        setup.generate(["a", "b", "c", "d"])
    assert len(setup.core.aborted) >= 2
    assert not setup.core.has_unfinished_requests()
    assert not setup.llm.llm_engine.output_processor.has_unfinished_requests()


def test_interrupt_aborts_and_the_engine_goes_on(setup: Setup) -> None:
    setup.core.interrupt_at_step = 3
    with pytest.raises(KeyboardInterrupt):
        setup.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert sorted(setup.core.aborted) == sorted(one.request_id for one in setup.core.seen)
    assert not setup.core.has_unfinished_requests()
    assert setup.llm.llm_engine.get_num_unfinished_requests() == 0
    (output,) = setup.generate("again", SamplingParams(max_tokens=50))
    assert output.outputs[0].text == "one two three"


def test_chat_renders_the_template(setup: Setup) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    (output,) = setup.llm.chat(messages, use_tqdm=False)
    text = "<|im|>system: be brief\n<|im|>user: a\nb\n<|im|>assistant: "
    assert output.prompt == text
    assert output.prompt_token_ids == setup.tokenizer.encode(text, add_special_tokens=False)
    mark = setup.tokenizer.convert_tokens_to_ids("<|im|>")
    assert list(output.prompt_token_ids or []).count(mark) == 3
    both = setup.llm.chat([messages, messages[1:]], use_tqdm=False, add_generation_prompt=False)
    assert [one.prompt for one in both] == [text[:39], text[23:39]]


@pytest.mark.parametrize(
    ("messages", "settings", "words"),
    [
        ([], {}, "at least one message"),
        ([{"content": "x"}], {}, 'message 0 is .* dict with a "role"'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "text only"),
        ([{"role": "user", "content": 5}], {}, "message 0: content=5"),
        (
            [{"role": "user", "content": "x"}],
            {"continue_final_message": True},
            "add_generation_prompt has to be False",
        ),
        (
            [{"role": "user", "content": "x"}],
            {"chat_template": "{{ raise_exception('no system') }}"},
            "the chat template refused the messages: no system",
        ),
    ],
)
def test_bad_chats(setup: Setup, messages: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        setup.llm.chat(messages, use_tqdm=False, **settings)
    assert setup.core.seen == []


def test_a_template_may_be_a_file(setup: Setup, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    messages = [{"role": "user", "content": "hello"}]
    (output,) = setup.llm.chat(messages, use_tqdm=False, chat_template=str(file))
    assert output.prompt == "<hello>"
    (output,) = LLM("nowhere", chat_template=str(file)).chat(messages, use_tqdm=False)
    assert output.prompt == "<hello>"
    with pytest.raises(ValueError, match="chat_template='/nowhere': there is no such file"):
        LLM("nowhere", chat_template="/nowhere")
    with pytest.raises(ValueError, match="chat_template=5: has to be a template's text"):
        LLM("nowhere", chat_template=5)


def test_tool_call_arguments_reach_the_template_as_objects(setup: Setup) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    call_text = "{{ f.name }} {{ f.arguments.city }}"
    template = "{% set f = messages[0].tool_calls[0].function %}" + call_text
    (output,) = setup.llm.chat(messages, use_tqdm=False, chat_template=template)
    assert output.prompt == "f Köln"
    assert call["function"] == {"name": "f", "arguments": '{"city": "Köln"}'}


def test_progress_bar_shows_tokens_per_second(setup: Setup) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str, **kwargs: Any) -> None:
            self.total, self.desc, self.count, self.text, self.closed = total, desc, 0, "", False
            bars.append(self)

        def update(self, amount: int) -> None:
            self.count += amount

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.text = text

        def close(self) -> None:
            self.closed = True

    setup.llm.generate(["a", "b"], SamplingParams(max_tokens=9), use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.count, bar.desc, bar.closed) == (2, 2, "Processed prompts", True)
    assert "input: " in bar.text
    assert "output: " in bar.text
    for wrong in ("yes", 1, None, []):
        with pytest.raises(ValueError, match=r"use_tqdm=.*: has to be True, False or a callable"):
            setup.llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=wrong)


def test_the_engine_goes_with_the_object(setup: Setup) -> None:
    setup.generate("x")
    alive = weakref.ref(setup.llm.llm_engine)
    gc.disable()
    try:
        del setup.llm
        assert alive() is None, "a reference cycle keeps the engine until the collector runs"
    finally:
        gc.enable()
    assert setup.core.num_shutdowns == 1


def test_shutdown_runs_once(setup: Setup) -> None:
    with setup.llm as llm:
        llm.generate("x", use_tqdm=False)
    setup.llm.shutdown()
    assert setup.core.num_shutdowns == 1


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_length"):
        LLM("nowhere", max_model_length=5)
