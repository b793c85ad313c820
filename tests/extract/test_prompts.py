"""Records -> token ids and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split, Whitespace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.models.checkpoints import CHAT_TEMPLATE, VOCAB_SIZE
from tests.transformers_utils.test_answer_masks import BYTES
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.prompts import Prompt, PromptMaker
from vllm.entrypoints.extract.records import Record, find_sources, read_records
from vllm.transformers_utils.chat_template import render_chat
from vllm.transformers_utils.tokenizer import get_tokenizer, is_certainly_longer, start_of

CHAT = [
    {"role": "user", "content": "Why π?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "Sö."},
]
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{%- generation %}{{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
COUNTING = "{% for m in messages %}{{ m['content'] }} of {{ messages | length }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return get_tokenizer(str(tiny_llama))


def make(tokenizer: Any, *all_values: dict[str, Any], **rules: Any) -> list[Prompt | str]:
    needed = {"input": ["-"], "output": "x", "layers": "last", "max_length": 500}
    maker = PromptMaker(tokenizer, "none", VOCAB_SIZE, ExtractOptions(**{**needed, **rules}))
    return maker.make([Record(i, f"a:{i + 1}", one) for i, one in enumerate(all_values)])


def one(tokenizer: Any, values: dict[str, Any], **rules: Any) -> Prompt:
    (made,) = make(tokenizer, values, **rules)
    assert isinstance(made, Prompt), made
    return made


def refusal(tokenizer: Any, values: dict[str, Any], **rules: Any) -> str:
    (made,) = make(tokenizer, values, **rules)
    assert isinstance(made, str)
    return made


def test_every_kind_together(tokenizer: Any) -> None:
    made = make(
        tokenizer,
        {"text": "äb"},
        {"messages": CHAT},
        {"token_ids": [5, 6]},
        {"prompt": "c", "text": "not this"},
        {"input_ids": [7], "messages": None, "text": "nor this"},
        {"prompt": "d", "prompt_token_ids": [8, 9]},
    )
    ids = [prompt.token_ids.tolist() for prompt in made if isinstance(prompt, Prompt)]
    chat = render_chat(tokenizer, CHAT, add_generation_prompt=False)["prompt_token_ids"]
    text = [tokenizer.encode(one, add_special_tokens=True) for one in ("äb", "c")]
    assert ids == [text[0], chat, [5, 6], text[1], [7], [8, 9]]


def test_sharegpt(tokenizer: Any) -> None:
    roles = {"user": "human", "assistant": "gpt"}
    chat = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "tool", "content": "7"}]
    values = {
        "conversations": [
            {"from": roles.get(one["role"], one["role"]), "value": one["content"], "weight": None}
            for one in chat
        ]
    }
    expected = one(tokenizer, {"messages": chat}, positions="mask")
    assert expected.mask is not None and expected.mask.any()
    named = {"chat": values["conversations"]}
    for record, options in ((values, {}), (named, {"messages_column": "chat"})):
        found = one(tokenizer, record, positions="mask", **options)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.mask is not None and found.mask.tolist() == expected.mask.tolist()
    for role, usual in (("chatgpt", "assistant"), ("observation", "tool")):
        record = {"conversations": [*values["conversations"], {"from": role, "value": "x"}]}
        message = {"role": usual, "content": "x"}
        assert one(tokenizer, record).token_ids.tolist() == (
            one(tokenizer, {"messages": [*chat, message]}).token_ids.tolist()
        )
    for bad in ([{"from": "gpt"}, {"value": "x"}], [{"from": ["gpt"], "value": "x"}]):
        assert refusal(tokenizer, {"conversations": bad}).startswith("bad messages")


def test_names_of_both_kinds_in_one_message(tokenizer: Any) -> None:
    """The text is read by whichever name it has."""
    expected = one(tokenizer, {"messages": CHAT[:2]}, positions="mask")
    why, because = (message["content"] for message in CHAT[:2])
    for messages in (
        [{"from": "human", "content": why}, {"from": "gpt", "content": because, "value": None}],
        [{"role": "user", "value": why}, {"role": "assistant", "value": because, "content": None}],
    ):
        found = one(tokenizer, {"conversations": messages}, positions="mask")
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.mask is not None and expected.mask is not None
        assert found.mask.tolist() == expected.mask.tolist()


def test_what_is_not_part_of_a_prompt_is_named(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for values, named in (
        ({"prompt": "a", "completion": "b"}, "'completion' beside 'prompt'"),
        ({"conversations": CHAT, "system": "c"}, "'system' beside 'conversations'"),
        ({"text": "a", "completion": "b"}, ""),
        ({"messages": CHAT, "system": None}, ""),
        ({"input_ids": [5, 6], "attention_mask": [1, 1]}, ""),
        ({"input_ids": [5, 6], "attention_mask": [0, 1]}, "where their attention_mask is 0"),
        ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]}, ""),
        ({"input_ids": [5, 6], "labels": [-100, 6]}, "a column 'labels' beside their token ids"),
    ):
        caplog.clear()
        one(tokenizer, values)
        assert named in caplog.text if named else not caplog.text


def test_tools_as_json_text(tokenizer: Any) -> None:
    """As tables have them, whose rows would get each other's keys."""
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"π": 1}}}]
    for stated in (tools, None):
        expected, found = (
            one(tokenizer, {"messages": CHAT[:1], "tools": form}, chat_template=template)
            for form in (stated, json.dumps(stated))
        )
        assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert refusal(tokenizer, {"messages": CHAT, "tools": "f"}).startswith("unreadable")


def test_calls_of_sharegpt(tokenizer: Any) -> None:
    """A call is what the assistant says: it is marked as an answer."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = {"chat_template": template, "positions": "mask"}
    call, asks = {"name": "add", "arguments": {"a": 1}}, {"from": "human", "value": "1+1"}
    for stated, functions in ((call, [call]), ([call, call], [call, call])):
        calls = {"from": "function_call", "value": json.dumps(stated)}
        message = {"role": "assistant", "tool_calls": [{"function": one} for one in functions]}
        usual = [{"role": "user", "content": "1+1"}, message]
        found = one(tokenizer, {"conversations": [asks, calls]}, **options)
        expected = one(tokenizer, {"messages": usual}, **options)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.mask is not None and found.mask.any()
        assert expected.mask is not None and found.mask.tolist() == expected.mask.tolist()
    for bad in ("add(1)", "7", '{"arguments": {}}', None):
        record = {"conversations": [asks, {"from": "function_call", "value": bad}]}
        assert "message 1: " in refusal(tokenizer, record, **options), bad


def test_named_columns_win(tokenizer: Any) -> None:
    values = {"input_ids": [1], "story": "abc", "chat": CHAT}
    assert one(tokenizer, values, prompt_column="story").token_ids.tolist() == (
        tokenizer.encode("abc", add_special_tokens=True)
    )
    assert len(one(tokenizer, values, messages_column="chat").token_ids) > 40
    assert refusal(tokenizer, values, prompt_column="tale").startswith(
        "no prompt: the record has none of tale"
    )


def test_templates(tokenizer: Any) -> None:
    template = (
        "{{ greeting }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}"
    )
    made = one(
        tokenizer,
        {"messages": CHAT[:1]},
        chat_template=template,
        chat_template_kwargs={"greeting": "Hi "},
        add_generation_prompt=True,
    )
    assert tokenizer.decode(made.token_ids.tolist()) == "Hi Why π?!"


def test_variables_of_a_record(tokenizer: Any) -> None:
    """They are put over those of the command."""
    options: Any = {
        "chat_template": "{{ a }} {{ b }} {{ messages[0].content }}",
        "chat_template_kwargs": {"a": "A", "b": "B"},
    }
    variables = {"b": "own"}
    made = one(tokenizer, {"messages": CHAT[:1], "chat_template_kwargs": variables}, **options)
    assert tokenizer.decode(made.token_ids.tolist()) == "A own Why π?"
    for bad in (["b"], '{"b": 1}', {"messages": 1}):
        record = {"messages": CHAT[:1], "chat_template_kwargs": bad}
        assert "chat_template_kwargs" in refusal(tokenizer, record, **options)


def test_keys_of_other_rows_are_not_in_a_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """A table gives each dict all keys, with null. The null of a JSON record is its own."""
    import pyarrow as arrow
    from pyarrow import parquet

    def record(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {key: {"type": name} for key in arguments}}
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        answer = {"role": "assistant", "tool_calls": [call]}
        messages = [{"role": "user", "content": name}, answer]
        return {"messages": messages, "tools": [tool], "chat_template_kwargs": {name: name}}

    records = [record("f", {"city": "x", "days": [1, 2]}), record("g", {"n": 3})]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    records.append(record("g", {"n": None}))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    template = (
        "{{ f }}{{ g }}{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    needed = {"output": "x", "layers": "last", "chat_template": template}
    options = ExtractOptions(input=["-"], positions="all", **needed)
    maker = PromptMaker(tokenizer, "none", VOCAB_SIZE, options)
    sources = find_sources([str(tmp_path)], "auto")
    texts = [
        tokenizer.decode(made.token_ids) if isinstance(made, Prompt) else made
        for made in maker.make(list(read_records(sources, maker.columns)))
    ]
    assert texts[:2] == texts[2:4]
    assert "null" not in texts[0] + texts[1] and '"n": null' in texts[4]


@pytest.mark.parametrize("template", [None, MARKED, "You help.\n" + CHAT_TEMPLATE])
@pytest.mark.parametrize("first", [0, 1])
def test_answers_of_the_assistant(tokenizer: Any, template: str | None, first: int) -> None:
    """The text that opens an answer is not part of it, not even in the first message."""
    made = one(tokenizer, {"messages": CHAT[first:]}, positions="mask", chat_template=template)
    assert made.mask is not None
    kept = made.token_ids[made.mask].tolist()
    assert tokenizer.decode(kept) == "Because.<|im_end|>\nSö.<|im_end|>\n"
    assert len(made.mask) == len(made.token_ids)


def test_a_tokenizer_without_offsets(tokenizer: Any) -> None:
    """Its masks come from the texts of its tokens; only a conversation needs them."""
    words = BYTES.get_vocab()
    for rule in ("answers", "last-answer,before"):
        values = {"messages": CHAT}
        made = one(BYTES, values, positions="mask", chat_template=CHAT_TEMPLATE, mask=rule)
        assert made.mask is not None
        kept = [t for t, counts in zip(made.token_ids, made.mask, strict=True) if counts]
        text = BYTES.decode(kept, spaces_between_special_tokens=False)
        last, before = "Sö.<|im_end|>\n", "\n" if "before" in rule else ""
        assert text == (before + last if "last" in rule else f"Because.<|im_end|>\n{last}")
    assert one(BYTES, {"text": "€ a"}).token_ids.tolist()[-1] == words[str(b"\x82\xac a")]


def test_answers_that_cannot_be_told(tokenizer: Any) -> None:
    reason = refusal(tokenizer, {"messages": CHAT}, positions="mask", chat_template=COUNTING)
    assert "message 1 lies cannot be told" in reason
    assert "{% generation %}" in reason


def test_answers_that_the_template_leaves_out(tokenizer: Any) -> None:
    reason = refusal(tokenizer, {"messages": CHAT}, chat_template=FORGETFUL)
    assert "message 1: the chat template leaves out the text of this message" in reason


def test_masks_from_a_column(tokenizer: Any) -> None:
    ids = [3, 4, 5, 6]
    made = one(tokenizer, {"input_ids": ids, "loss_mask": [0, 1, 0, 2]}, positions="mask")
    assert made.mask is not None
    assert made.mask.tolist() == [False, True, False, True]
    for mask in (None, [1, 1], [[1, 1, 1, 1]], ["a"] * 4, [0, 0, 0, 0]):
        reason = refusal(tokenizer, {"input_ids": ids, "loss_mask": mask}, positions="mask")
        assert reason.startswith("bad mask"), mask
    named = one(tokenizer, {"input_ids": ids, "m": ids}, positions="mask", mask_column="m")
    assert named.mask is not None and named.mask.all()


def test_long_prompts(tokenizer: Any) -> None:
    values = {"input_ids": list(range(9)), "loss_mask": [0] * 8 + [1]}
    assert refusal(tokenizer, values, max_length=8) == "too long: 9 tokens, at most 8 are taken"
    made = one(tokenizer, values, max_length=8, on_long="truncate")
    assert made.token_ids.tolist() == list(range(8))
    assert made.is_truncated
    assert refusal(tokenizer, values, max_length=8, on_long="truncate", positions="mask") == (
        "bad mask: it selects no token"
    )
    with pytest.raises(ValueError, match="a:1: too long: 9 tokens"):
        make(tokenizer, values, max_length=8, on_long="error")
    assert not one(tokenizer, values, max_length=9).is_truncated


def test_texts_that_are_far_too_long_are_not_tokenised(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Why π? " * 200_000
    first = tokenizer.encode(text[:1000], add_special_tokens=True)[:64]
    seen: list[int] = []
    tokenise = type(tokenizer).__call__

    def watched(self: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(map(len, texts))
        return tokenise(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", watched)
    cut = one(tokenizer, {"text": text}, max_length=64, on_long="truncate")
    assert cut.token_ids.tolist() == first and cut.is_truncated
    assert 0 < seen.pop() < 100_000
    assert refusal(tokenizer, {"text": text}, max_length=64) == (
        "too long: 1400000 characters, at most 64 tokens are taken"
    )
    with pytest.raises(ValueError, match="a:1: too long: 1400000 characters"):
        make(tokenizer, {"text": text}, max_length=64, on_long="error")
    assert not seen
    chat = [{"role": "user", "content": text}]
    assert refusal(tokenizer, {"messages": chat}, max_length=64).startswith("too long: 14")


def test_lengths_that_cannot_be_told_are_not(tokenizer: Any) -> None:
    """Words of any length may be one token where a tokenizer does not keep every byte."""
    text = "a" * 100_000
    assert is_certainly_longer(tokenizer, text, 64)
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    other: Any = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert not is_certainly_longer(other, text, 64) and start_of(other, text, 64) == text
    assert one(other, {"text": text}, max_length=64).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (normalizers.Strip(), ByteLevel(use_regex=False)),
        (normalizers.Replace(Regex(r"\s+"), " "), ByteLevel(use_regex=False)),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "")]), ByteLevel()),
        (None, Sequence([WhitespaceSplit(), ByteLevel()])),
        (None, Sequence([Split(" ", "removed"), ByteLevel()])),
    ],
)
def test_white_space_that_has_no_tokens(
    tokenizer: Any, normalizer: Any, pre_tokenizer: Any
) -> None:
    """A text of any length may be short, and its first tokens may be far behind its beginning."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    other: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = " " * 1_000_000 + "word"
    expected = other(text)["input_ids"]
    assert len(expected) < 10
    made = one(other, {"text": text}, max_length=64, on_long="truncate")
    assert made.token_ids.tolist() == expected and not made.is_truncated
    assert is_certainly_longer(tokenizer, text, 64)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"input_ids": []}, "bad token ids"),
        ({"input_ids": [1, VOCAB_SIZE]}, "bad token ids"),
        ({"input_ids": [-1]}, "bad token ids"),
        ({"input_ids": [1.5]}, "bad token ids"),
        ({"input_ids": [True]}, "bad token ids"),
        ({"input_ids": [1, True]}, "bad token ids"),
        ({"input_ids": [[1], [2, 3]]}, "bad token ids"),
        ({"input_ids": "abc"}, "bad token ids"),
        ({"input_ids": [2**70]}, "bad token ids"),
        ({"text": ""}, "bad text"),
        ({"text": 7}, "bad text"),
        ({"text": "\ud800"}, "bad text"),
        ({"messages": "hello"}, "bad messages"),
        ({"messages": [{"content": "x"}]}, "bad messages"),
        ({"messages": []}, "bad messages"),
        ({"messages": 5}, "bad messages"),
        ({"messages": [{"role": "user", "content": DEEP}]}, "bad messages"),
        ({"input_ids": DEEP}, "bad token ids"),
        ({}, "no prompt"),
    ],
)
def test_bad_records(tokenizer: Any, values: dict[str, Any], kind: str) -> None:
    first, second, third = make(tokenizer, {"text": "a"}, values, {"text": "b"})
    assert isinstance(second, str)
    assert second.split(":")[0] == kind
    assert isinstance(first, Prompt) and isinstance(third, Prompt)


def test_without_a_tokenizer() -> None:
    assert refusal(None, {"text": "a"}) == "no tokenizer: none"
    assert one(None, {"input_ids": [1, 2]}).token_ids.tolist() == [1, 2]


def test_names(tokenizer: Any) -> None:
    assert one(tokenizer, {"input_ids": [1], "id": 17}, id_column="id", format="files").name == "17"
    for values in ({}, {"id": None}, {"id": ""}):  # a number may be another sample's name
        values |= {"input_ids": [1]}
        assert refusal(tokenizer, values, id_column="id", format="files").startswith("no id")
