"""Answers of the assistant in conversations that templates rewrite as they go on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vllm.transformers_utils.answer_spans import AnswerFinder, without_empty_reasoning
from vllm.transformers_utils.chat_template import chat_text

ENDS = ["<|im_end|>", "<|end|>", "<|return|>", "<|eot|>"]
TOKENIZER: Any = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"<unk>": 0})), additional_special_tokens=ENDS
)
LAST = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}" + (
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\nOPENING{% endif %}"
LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ANSWER"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
CALLS = "{% for t in m.tool_calls or [] %}<call>{{ t.function | tojson }}</call>{% endfor %}"
CONTENT = "{{ m.content.split('</think>')[-1].strip() }}"

# An answer behind the last question has a reasoning block, earlier ones have none.
REASONING_LAST = (
    LAST
    + LOOP.replace(
        "ANSWER",
        "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '').strip() }}\n</think>"
        f"\n\n{{% endif %}}{CONTENT}{CALLS}",
    )
    + PROMPT.replace("OPENING", "")
)
# The same, and the prompt opens the block.
REASONING_OPENED = REASONING_LAST.replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)
# The same, and the prompt skips the block.
REASONING_SKIPPED = REASONING_LAST.replace(
    "assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Earlier answers have an empty block in front.
EMPTY_BEFORE = (
    LAST
    + LOOP.replace(
        "ANSWER",
        "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or 'none' }}\n</think>\n"
        f"{{% else %}}<think></think>{{% endif %}}{CONTENT}{CALLS}",
    )
    + PROMPT.replace("OPENING", "<think>\n")
)
# The last answer ends with a token of its own.
OTHER_END = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {
    "reasoning last": (REASONING_LAST, "<|im_end|>\n"),
    "reasoning opened": (REASONING_OPENED, "<|im_end|>\n"),
    "reasoning skipped": (REASONING_SKIPPED, "<|im_end|>\n"),
    "empty before": (EMPTY_BEFORE, "<|im_end|>\n"),
}


def render(template: str, messages: list[Any], asks: bool = False) -> str:
    return chat_text(TOKENIZER, messages, chat_template=template, add_generation_prompt=asks)


def answers(template: str, messages: list[Any]) -> list[str]:
    finder = AnswerFinder(
        lambda some, asks: render(template, some, asks), TOKENIZER.all_special_tokens
    )
    text = render(template, messages)
    return [text[start:end] for start, end in finder.find(messages, text)]


def chat(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


CONVERSATIONS = {
    "plain": chat("Why?", "Because.", "So?", "So."),
    "alike": chat("So", "So", "So", "So", "So", "So"),
    "like the markers": chat("q", "qq", "x", "v", "h", "wh"),
    "spaces": chat(" a ", " b ", " c\n", "d\n\n", "e", "f "),
    "like the template": chat("<|im_end|>", "assistant\n", "\n", "<|im_start|>", "user", "end|>\n"),
    "reasoning": chat("a", "<think>x</think>b", "c", "<think>y</think>d", "e", "f"),
    "open end": chat("a", "b", "c"),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_of_several_turns(name: str, conversation: str) -> None:
    """Each begins behind what asks for it, and ends with the end of its turn."""
    template, end = TEMPLATES[name]
    messages = CONVERSATIONS[conversation]
    found = answers(template, messages)
    contents = [m["content"] for m in messages if m["role"] == "assistant"]
    wanted = [content.split("</think>")[-1].strip() + end for content in contents]
    block = "<think></think>" if name == "empty before" else ""
    for got, want in zip(found[:-1], wanted[:-1], strict=True):
        assert got == block + want
    # The last one keeps what the template writes of its reasoning behind the prompt.
    last, is_over = found[-1].removesuffix(wanted[-1]), conversation == "open end"
    assert found[-1].endswith(wanted[-1])
    assert (
        last == block if is_over else re.fullmatch(r"(<think>)?\s*(none)?\s*(</think>)?\s*", last)
    )


def test_the_last_answer_ends_otherwise() -> None:
    found = answers(OTHER_END, chat("a", "b", "c", "d"))
    assert found == ["<|message|>b<|end|>", "<|message|>d<|return|>"]
    assert answers(OTHER_END, chat("a", "b", "c")) == ["<|message|>b<|end|>"]


def test_calls() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    messages = [
        *chat("a", "", "c", ""),
        {"role": "tool", "content": "rain"},
        *chat("x", "done", "y")[1:],
    ]
    messages[1]["tool_calls"] = [call]
    messages[3]["tool_calls"] = [call, call]
    shown = '<call>{"name": "f", "arguments": {"city": "Köln"}}</call>'
    for template in (REASONING_LAST, REASONING_OPENED, REASONING_SKIPPED):
        found = answers(template, messages)
        assert found[:2] == [f"{shown}<|im_end|>\n", f"{shown}{shown}<|im_end|>\n"]
        assert found[2] == "done<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% endfor %}",
        REASONING_LAST.replace("<|im_end|>", "{{ messages | length }}"),
    ],
)
def test_answers_that_cannot_be_told(template: str) -> None:
    with pytest.raises(ValueError, match="answer in message 1 lies cannot be told"):
        AnswerFinder(lambda some, asks: loose(template, some, asks)).find(
            chat("a", "b", "c", "d"), loose(template, chat("a", "b", "c", "d"), False)
        )


def loose(template: str, messages: list[Any], asks: bool) -> str:
    """Also what :func:`chat_text` refuses."""
    text: str = TOKENIZER.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=asks
    )
    return text


def test_empty_reasoning_may_be_left_out() -> None:
    text = "a<think>\n\n</think>\n\nbc[THINK][/THINK]d<think>x</think>e"
    middle, last = text.index("c["), text.index("d<")
    spans = ((1, middle), (middle, last), (last, len(text)), (0, 1))
    kept = without_empty_reasoning(text, spans)
    shown = [text[start:end] for start, end in kept]
    assert shown == ["b", "c[THINK][/THINK]", "d<think>x</think>e", "a"]
