"""Uses of extract() that newcomers try first: one layer, messages, pooling, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import core_of, engine, random_prompts
from vllm import LLM
from vllm.hidden_states import (
    ExtractRequest,
    FailedSample,
    HiddenStatesError,
    HiddenStatesSample,
)
from vllm.v1.rows.fields.fp8 import quantize_rows

Checkpoint = Callable[..., Path]
LENGTHS = [5, 33, 1, 60]


def rows(llm: LLM, *arguments: Any, **options: Any) -> list[torch.Tensor]:
    samples = list(llm.extract(*arguments, **options))
    assert all(isinstance(sample, HiddenStatesSample) for sample in samples)
    return [sample.hidden_states for sample in samples]  # type: ignore[union-attr]


def test_layers_as_they_come(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(1, LENGTHS)
    with engine(checkpoint("llama")) as llm:
        expected = rows(llm, prompts, [2])
        for layers in (2, np.int64(2), "2", [np.int32(2)], range(2, 3), np.array([2]), iter([2])):
            for one, other in zip(rows(llm, prompts, layers), expected, strict=True):
                assert torch.equal(one, other)
        sample = next(llm.extract(prompts, 2))
    assert repr(sample) == "HiddenStatesSample(0: 5 tokens, rows [5, 1, 72] float32, layers [2])"


@pytest.mark.parametrize("dtype", ["auto", "float16", "fp8"])
@pytest.mark.parametrize("positions", ["all", "every:4"])
def test_one_row_a_prompt(checkpoint: Checkpoint, positions: str, dtype: str) -> None:
    prompts = random_prompts(2, LENGTHS)
    with engine(checkpoint("llama", dtype=torch.bfloat16)) as llm:
        whole = list(llm.extract(prompts, [1, 4], positions, "float32"))
        last = list(llm.extract(prompts, [1, 4], positions, dtype, pooling="last"))
        mean = list(llm.extract(prompts, [1, 4], positions, dtype, pooling="mean"))
        unpooled = list(llm.extract(prompts, [1, 4], positions, dtype))
    stored = {"auto": torch.bfloat16, "float16": torch.float16}
    for all_rows, one, formed, plain in zip(whole, last, mean, unpooled, strict=True):
        assert torch.equal(one.hidden_states, plain.hidden_states[-1:])
        assert one.positions.tolist() == formed.positions.tolist() == plain.positions[-1:].tolist()
        expected = all_rows.hidden_states.mean(0, keepdim=True)
        if dtype == "fp8":
            values, scales = quantize_rows(expected)
            assert formed.scales is not None
            assert torch.equal(formed.scales, scales)
            assert torch.equal(formed.hidden_states.float(), values.float())
        else:
            assert torch.equal(formed.hidden_states, expected.to(stored[dtype]))


def test_a_mean_that_its_dtype_cannot_hold_is_an_error(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), enable_prompt_embeds=True) as llm:
        good, large = torch.randn(3, 72), torch.randn(3, 72)
        large[:, 5] = 1e5
        prompts = [{"prompt_embeds": embeds} for embeds in (good, large, good)]
        settings: dict[str, Any] = {"layers": 0, "dtype": "float16", "pooling": "mean"}
        samples = llm.extract(prompts, **settings)
        assert next(samples).index == 0
        with pytest.raises(HiddenStatesError, match=r"prompt 1: mean in float16: .* not finite"):
            next(samples)
        first, second, third = llm.extract(prompts, on_error="yield", **settings)
        hooks = {"hooks": ["blocks.0.hook_in"], "layers": "norm"}
        with pytest.raises(HiddenStatesError, match=r"mean in float16: blocks\.0\.hook_in is"):
            list(llm.extract(prompts, **settings | hooks))
    assert isinstance(second, FailedSample)
    assert isinstance(first, HiddenStatesSample)
    assert isinstance(third, HiddenStatesSample)
    assert torch.equal(first.hidden_states, third.hidden_states)


def test_messages(checkpoint: Checkpoint) -> None:
    chats = [
        [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}],
        [{"role": "user", "content": "Three?"}],
    ]
    with engine(checkpoint("llama")) as llm:
        tokenizer: Any = llm.get_tokenizer()
        expected = [
            tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats
        ]
        several = list(llm.extract(chats, 4))
        records = list(llm.extract(({"messages": chat} for chat in chats), 4))
        (alone,) = llm.extract(chats[0], 4)
        (asked,) = llm.extract(ExtractRequest(chats[1], positions="last"), 4)
        image = [{"role": "user", "content": [{"type": "image"}]}]
        salted = {"messages": chats[0], "cache_salt": 5}
        other = {"messages": chats[0], "add_generation_prompt": True}
        bad = list(llm.extract([image, "text", salted, other], 4, on_error="yield", ordered=True))
        tokenizer.chat_template = "{{ a }}" + tokenizer.chat_template
        variables = {"messages": chats[1], "chat_template_kwargs": {"a": "Be brief. "}}
        (varied,) = llm.extract(variables, 4)
    for samples in (several, records, [alone, several[1]]):
        assert [sample.token_ids.tolist() for sample in samples] == expected
    assert torch.equal(asked.hidden_states, several[1].hidden_states[-1:])
    assert isinstance(bad[0], FailedSample)
    assert "image" in bad[0].reason
    assert isinstance(bad[1], HiddenStatesSample)
    assert isinstance(bad[2], FailedSample) and "'cache_salt' of a prompt is 5" in bad[2].reason
    assert isinstance(bad[3], FailedSample)
    assert "'add_generation_prompt' is not supported" in bad[3].reason
    assert tokenizer.decode(varied.token_ids.tolist()).startswith("Be brief. <|im_start|>")


def test_masks_of_conversations(checkpoint: Checkpoint) -> None:
    """A rule of the call or of the request; prompts of another kind have no mask by it."""
    chat = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "π?"),
            ("assistant", "A."),
            ("user", "b?"),
            ("assistant", "B"),
        )
    ]
    parts = [
        ("<|im_start|>user\nπ?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("A.<|im_end|>\n", 1),
        ("<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("B<|im_end|>\n", 2),
    ]
    own = ExtractRequest({"messages": chat}, mask="answers,before", positions="mask")
    with engine(checkpoint("llama"), skip_tokenizer_init=False) as llm:
        encode = llm.get_tokenizer().encode
        ids = [encode(part, add_special_tokens=False, verbose=False) for part, _ in parts]
        answers = [n for part, (_, n) in zip(ids, parts, strict=True) for _ in part]
        (plain,) = llm.extract([chat], [1])
        last, text, before = llm.extract([chat, "a text", own], [1], mask="last-answer")
        (kept,) = llm.extract([chat], [1], "mask", mask="answers")
        for wrong, options, message in (
            (ExtractRequest("a text", mask="answers"), {}, "mask='answers': only a conversation"),
            (ExtractRequest(chat, mask="last"), {}, "mask='last': use answers or last-answer"),
            (chat, {"mask": [1, 0]}, r"mask=\[1, 0\]: use answers or last-answer"),
            ("a text", {"mask": "answers", "positions": "mask"}, "none was passed"),
        ):
            with pytest.raises(ValueError, match=message):
                list(llm.extract(wrong, [1], **options))
    assert plain.token_ids.tolist() == last.token_ids.tolist() == [t for part in ids for t in part]
    assert plain.loss_mask is None and text.loss_mask is None
    assert last.loss_mask.tolist() == [n == 2 for n in answers]
    wanted = [max(pair) > 0 for pair in zip(answers, [*answers[1:], 0], strict=True)]
    for sample, mask in ((before, wanted), (kept, [n > 0 for n in answers])):
        assert sample.positions.tolist() == [i for i, counts in enumerate(mask) if counts]
        assert torch.equal(sample.hidden_states, plain.hidden_states[mask])
        assert sample.loss_mask.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_in_flight": 1.5}, "max_in_flight=1.5: has to be a whole number of at least 1"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
        ({"pooling": "max"}, "pooling='max': use none, mean, last"),
        ({"layers": True}, "layers: True is not a layer id"),
        ({"layers": slice(0, 2)}, r"layers: slice\(0, 2, None\) is not a layer id"),
        ({"ordered": "no"}, "ordered='no': has to be true or false"),
        ({"add_special_tokens": "no"}, "add_special_tokens='no': has to be true or false"),
    ],
)
def test_what_is_refused(checkpoint: Checkpoint, options: dict[str, Any], message: str) -> None:
    with engine(checkpoint("llama")) as llm, pytest.raises(ValueError, match=message):
        list(llm.extract(["a"], **{"layers": 1, **options}))


def test_a_small_model_takes_a_small_pool(checkpoint: Checkpoint) -> None:
    """The pool takes what its requests can use, though gigabytes are free."""
    sizes = []
    for num_requests in (1, 3):
        llm = LLM(str(checkpoint("llama")), max_model_len=160, max_num_seqs=num_requests)
        plan = core_of(llm).kv_cache_config
        sizes.append(plan.num_blocks)
        assert plan.size_bytes < 2**22
        prompts = random_prompts(1, [150] * 5)
        assert [len(one) for one in rows(llm, prompts, 2)] == [150] * 5
        llm.shutdown()
    assert (sizes[1] - 1) == 3 * (sizes[0] - 1)
