"""Answers of the assistant in conversations that templates rewrite as they go on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vllm.transformers_utils import answer_spans
from vllm.transformers_utils.answer_masks import MaskRule
from vllm.transformers_utils.answer_spans import chat_answers

PLAIN = MaskRule(with_boilerplate=False)
TOKENIZER: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0})))
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


def answers(template: str, messages: list[Any], asks: bool = False, **options: Any) -> list[str]:
    text, spans = chat_answers(
        TOKENIZER, messages, chat_template=template, add_generation_prompt=asks, **options
    )
    return [text[start:end] for start, end in spans]


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


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_at_the_end_is_not_part_of_an_answer(name: str) -> None:
    template, messages = TEMPLATES[name][0], chat("a", "b", "c", "d")
    assert answers(template, messages, asks=True) == answers(template, messages)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
OWN_END = TURNS.replace("</{{ m.role }}>", "{{ '</assistant>' if m.role == 'assistant' }}")
END_IF_NOT_LAST = TURNS.replace("</{{ m.role }}>", "{{ '' if loop.last else '</turn>' }}")
HALF_A_PROMPT = (
    "{% for m in messages %}<turn><{{ m.role }}>{{ '<answer>' if m.role == 'assistant' }}"
    "{{ m.content }}{{ '</answer>' if m.role == 'assistant' }}</turn>{% endfor %}"
    "<turn><assistant>{{ '<answer>' if add_generation_prompt }}"
)
TURNS_OF_FOUR = {
    "tells": (TURNS + ASKS, ["b</assistant>", "d</assistant>"]),
    "never writes a prompt": (TURNS, ["b</assistant>", "d</assistant>"]),
    "always writes a prompt": (
        TURNS + "{% if messages[-1].role != 'assistant' %}<assistant>{% endif %}",
        ["b</assistant>", "d</assistant>"],
    ),
    "always writes half a prompt": (HALF_A_PROMPT, ["b</answer></turn>", "d</answer></turn>"]),
    "ends answers alone": (OWN_END + ASKS, ["b</assistant>", "d</assistant>"]),
    "the last has no end": (END_IF_NOT_LAST + ASKS, ["b</turn>", "d"]),
    "another end if last": (OTHER_END, ["<|message|>b<|end|>", "<|message|>d<|return|>"]),
}


@pytest.mark.parametrize("name", TURNS_OF_FOUR)
def test_answers_have_their_end_and_no_header(name: str) -> None:
    template, wanted = TURNS_OF_FOUR[name]
    assert answers(template, chat("a", "b", "c", "d")) == wanted


def test_an_end_is_not_taken_from_the_next_message() -> None:
    """The text ends with a token that stands where the next question's header would."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else '<|endoftext|>' }}"
    )
    assert answers(template, chat("a", "b", "c", "d"))[0] == "b<|end|>"


def test_an_answer_that_is_to_be_continued_may_end_in_spaces() -> None:
    messages = chat("a", "b ", "c", "d  ")
    found = answers(TURNS + ASKS, messages, continue_final_message=True)
    assert found == ["b </assistant>", "d  "]


def test_a_template_may_write_the_end_of_an_id() -> None:
    template = TURNS.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.name }}:{{ t.id[-9:] }}"
        "{% endfor %}",
    )
    messages = chat("a", "b", "c", "")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages[3]["tool_calls"] = [{**call, "id": "call_0123456789"}]
    calls = template.replace("t.function.name", "t.function | tojson") + ASKS
    shown = '{"name": "f", "arguments": {}}:123456789</assistant>'
    assert answers(calls, messages) == ["b</assistant>", shown]


def test_two_answers_in_a_row() -> None:
    messages = [*chat("a", "b"), {"role": "assistant", "content": "c"}, *chat("d", "e")]
    assert answers(TURNS + ASKS, messages) == [f"{answer}</assistant>" for answer in "bce"]


def test_a_first_answer_is_refused_where_nothing_shows_its_beginning() -> None:
    template = "Preamble. " + TURNS.replace("<{{ m.role }}>", "{{ '# ' if m.role == 'user' }}")
    for messages in (chat("", "b")[1:], chat("", "b", "c", "d")[1:]):
        with pytest.raises(ValueError, match="answer in message 0 lies cannot be told"):
            answers(template, messages)
    assert answers("Preamble. " + TURNS + ASKS, chat("", "b")[1:]) == ["b</assistant>"]


def test_a_switch_in_a_text_stays() -> None:
    """Markers keep the words that a template looks for in a text."""
    template = (
        TURNS
        + "{% if add_generation_prompt %}<assistant>"
        + "{{ '<think></think>' if '/brief' in messages[-1].content }}{% endif %}"
    )
    found = answers(template, chat("a /brief", "b", "c", "d"))
    assert found == ["b</assistant>", "d</assistant>"]


@pytest.mark.parametrize(
    "template",
    [
        REASONING_LAST.replace("<|im_end|>", "{{ messages | length }}"),
        (TURNS + ASKS).replace("{{ m.content }}", "{{ m.content }}{{ m.content | length }}"),
    ],
)
def test_answers_that_cannot_be_told(template: str) -> None:
    with pytest.raises(ValueError, match=r"where the answers? .*lie.* cannot be told"):
        answers(template, chat("a", "b", "c", "d"))


REASONING_IN_MARKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}"
    "{% generation %}<a><think>\n\n</think>\n\n{{ m.content }}</a>{% endgeneration %}"
    "{% endif %}{% endfor %}"
)


def test_answers_that_should_not_count_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_spans.logger, "_logged_once", set(), raising=False)
    template = LOOP.replace("ANSWER", "{{ m.content }}") + PROMPT.replace("OPENING", "")
    messages = chat("a", "b", "c", "d")
    with caplog.at_level("WARNING", logger="vllm"):
        messages[1] |= {"weight": 1, "train": True}
        messages[2] |= {"loss": False}
        chat_answers(TOKENIZER, messages, chat_template=template)
        assert not caplog.text
        messages[1] |= {"weight": 0, "train": False}
        chat_answers(TOKENIZER, messages, chat_template=template)
    assert "'weight' of 0" in caplog.text and "'train' of 0" in caplog.text


def test_empty_reasoning_may_be_left_out() -> None:
    messages = chat("a", "b", "c", "d")
    for template in (REASONING_LAST, REASONING_OPENED, REASONING_SKIPPED):
        found = answers(template, messages, rule=PLAIN)
        assert found == ["b<|im_end|>\n", "d<|im_end|>\n"]
    messages[3]["reasoning_content"] = "x"
    assert "x" in answers(REASONING_LAST, messages, rule=PLAIN)[-1]
    assert answers(REASONING_IN_MARKS, chat("a", "b")) == ["<a><think>\n\n</think>\n\nb</a>"]
    kept = answers(REASONING_IN_MARKS, chat("a", "b"), rule=PLAIN)
    assert kept == ["b</a>"]


LAST_ONLY = MaskRule(last_only=True)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answer_alone(name: str, conversation: str) -> None:
    template, messages = TEMPLATES[name][0], CONVERSATIONS[conversation]
    assert answers(template, messages, rule=LAST_ONLY) == answers(template, messages)[-1:]


@pytest.mark.parametrize("name", TURNS_OF_FOUR)
def test_the_last_of_four_turns_and_of_answers_in_a_row(name: str) -> None:
    template, wanted = TURNS_OF_FOUR[name]
    assert answers(template, chat("a", "b", "c", "d"), rule=LAST_ONLY) == wanted[1:]
    messages = [*chat("a", "b", "c", "d"), {"role": "assistant", "content": "e"}]
    if name != "the last has no end":
        assert answers(template, messages, rule=LAST_ONLY) == answers(template, messages)[-1:]
    assert answers(template, chat("a"), rule=LAST_ONLY) == []


def test_earlier_answers_need_no_place() -> None:
    """The first message has no beginning that could be told."""
    template = "Preamble. " + TURNS.replace("<{{ m.role }}>", "{{ '# ' if m.role == 'user' }}")
    messages = chat("", "b", "c", "d")[1:]
    with pytest.raises(ValueError, match="answer in message 0 lies cannot be told"):
        answers(template, messages)
    assert answers(template, messages, rule=LAST_ONLY) == ["d</assistant>"]


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and BARRED %}"
    "{% generation %}{{ m.content }}</a>{% endgeneration %}"
    "{% else %}{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}"
)


def test_the_last_of_marked_answers() -> None:
    marked = MARKED.replace("BARRED", "true")
    for messages, wanted in (
        (chat("a", "b", "c", "d"), ["d</a>"]),
        (chat("a", "b", "c", "d", "e"), ["d</a>"]),
        (chat("a", "b", "c", ""), ["</a>"]),
        ([*chat("a", "b"), {"role": "assistant", "content": "c"}], ["c</a>"]),
        (chat("a"), []),
    ):
        assert answers(marked, messages, rule=LAST_ONLY) == wanted
    found = answers(REASONING_IN_MARKS, chat("a", "b", "c", "d"), rule=LAST_ONLY)
    assert found == ["<a><think>\n\n</think>\n\nd</a>"]
    barred = MARKED.replace("BARRED", "not loop.last")
    with pytest.raises(ValueError, match="message 3: the chat template does not mark this answer"):
        answers(barred, chat("a", "b", "c", "d"), rule=LAST_ONLY)


def test_the_last_answer_of_several_marks() -> None:
    """All its marks count, whatever is between them, and none of the answer before."""
    marked = MARKED.replace("BARRED", "true").replace(
        "</a>", "{% endgeneration %}{% generation %}</a>"
    )
    answer = {"role": "assistant", "content": "c"}
    for messages, wanted in (
        (chat("a", "b\n", "c"), ["b\n", "</a>"]),
        ([*chat("a", "b"), answer], ["c", "</a>"]),
        ([*chat("a", "b", "<think>"), answer], ["c", "</a>"]),
    ):
        assert answers(marked, messages, rule=LAST_ONLY) == wanted


def test_a_text_of_tags_alone_has_a_place() -> None:
    for text in ("<think>", "</think>\n", "</assistant>\n"):
        for template, messages in (
            (TURNS + ASKS, chat(text, "b")),
            (TURNS.replace("m.content", "m.content | trim") + ASKS, chat("a", "b" + text)),
        ):
            wanted = messages[1]["content"].rstrip() + "</assistant>"
            assert answers(template, messages) == [wanted]


def test_a_header_that_counts_messages_is_not_cut() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }} of={{ messages | length }}>{{ m.content }}"
        "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}"
        "<assistant of={{ messages | length }}>{% endif %}"
    )
    with pytest.raises(ValueError, match="answer in message 1 lies cannot be told"):
        answers(template, chat("a", "b"))


def test_headers_in_marks_may_be_left_out() -> None:
    """Also those of answers in a row, whose ends stay."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "<|im_start|>assistant\n<think>\n{{ m.reasoning }}\n</think>\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [*chat("a", "b"), {"role": "assistant", "content": "c"}, *chat("d", "e")]
    messages[1]["reasoning"] = "x"
    assert answers(template, messages, rule=PLAIN) == [
        "<think>\nx\n</think>\nb<|im_end|>\n",
        "c<|im_end|>\n",
        "e<|im_end|>\n",
    ]
    assert answers(MARKED.replace("BARRED", "true"), chat("a", "b"), rule=PLAIN) == ["b</a>"]


MARKS = "{% generation %}", "{% endgeneration %}"
ANSWER = (
    "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</a>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
)
SET = f"{{% set t %}}{ANSWER}{{% endset %}}"


def each(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


MARKS_IN = {
    "a macro": f"{{% macro turn(m) %}}{ANSWER}{{% endmacro %}}" + each("{{ turn(m) }}"),
    "a caller": "{% macro w() %}* {{ caller() }}{% endmacro %}"
    + each(f"{{% call w() %}}{ANSWER}{{% endcall %}}"),
    "a block": each(SET + "{{ t }}"),
    "a namespace": "{% set ns = namespace(t='') %}"
    + each(SET + "{% set ns.t = ns.t ~ t %}")
    + "{{ ns.t }}",
    "a filter": each(f"{{% filter trim %}}{ANSWER} {{% endfilter %}}"),
    "a recursive loop": each(ANSWER).replace("messages", "messages recursive"),
    "marks": each(ANSWER.replace("{{ m.content }}</a>", "{{ m.content }}</a>".join(MARKS))),
    "lines": "  " + each("\n  " + ANSWER.replace("{%", "\n {%")) + "\n\n",
    "spellings": each(
        ANSWER.replace(MARKS[0], "{%+ generation %}").replace(MARKS[1], "{%-endgeneration\n-%}")
    ),
}


@pytest.mark.parametrize("name", MARKS_IN)
def test_marks_lie_where_the_text_has_them(name: str) -> None:
    """Their place in the text does not depend on the part of the template that writes them."""
    messages = chat("Why?", "Because.", "So?", " éso 🙂 ")
    found = answers(MARKS_IN[name], messages)
    assert [one.strip() for one in found] == ["Because.</a>", "éso 🙂 </a>"]
    assert answers(MARKS_IN[name], messages, rule=LAST_ONLY) == found[1:]
    going_on = answers(MARKS_IN[name], messages[:2], continue_final_message=True)
    assert [one.strip() for one in going_on] == ["Because."]


def test_any_character_may_be_in_a_marked_text() -> None:
    """Also those that Unicode has for uses inside of programs, with which marks are found."""
    messages = chat("\ufdd0", "Because\ufdd1\ufdd2")
    assert answers(each(ANSWER), messages) == ["Because\ufdd1\ufdd2</a>"]


def test_marks_that_the_template_changes_are_refused() -> None:
    trimmed = "{% filter trim %}{% generation %} {{ m.content }}{% endgeneration %}{% endfilter %}"
    template = each(f"<{{{{ m.role }}}}>{trimmed}")
    with pytest.raises(ValueError, match=r"changes what it has marked with \{% generation %\}"):
        answers(template, chat("a", "b"))


def test_the_end_of_a_conversation_is_not_part_of_its_last_answer() -> None:
    """A template may write it behind whoever spoke last, unless it asks for an answer."""
    template = TURNS + "{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"
    wanted = ["b</assistant>", "d</assistant>"]
    for messages in (chat("a", "b", "c", "d"), chat("a", "b", "c", "d", "e")):
        assert answers(template, messages) == answers(template, messages, asks=True) == wanted
