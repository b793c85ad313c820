"""Conversations reach a template in the forms that it reads."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vllm.transformers_utils.answer_spans import chat_answers
from vllm.transformers_utils.chat_rendering import Rendering, marks_answers
from vllm.transformers_utils.chat_template import chat_text, load_chat_template, unread_fields

TOKENIZER: Any = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")), unk_token="<unk>"
)
EACH = "{% for m in messages %}<{{ m.role }}>BODY</{{ m.role }}>{% endfor %}"
TEXT = EACH.replace("BODY", "{{ m.content | trim }}")
PARTS = {
    "filter": EACH.replace(
        "BODY",
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c.text }}"
        "{% endfor %}",
    ),
    "alias": EACH.replace(
        "BODY", "{% set x = m.content %}{% for c in x %}{{ c.text }}{% endfor %}"
    ),
    "macro": "{% macro all(xs) %}{% for c in xs %}{{ c['text'] | upper }}{% endfor %}{% endmacro %}"
    + EACH.replace("BODY", "{{ all(m.content) }}"),
    "index": EACH.replace("BODY", "{{ m.content[0]['text'] }}"),
    "a system message first": "{{ raise_exception('no system') if messages[0].role != 'system' }}"
    + EACH.replace("BODY", "{% for c in m.content %}{{ c.text }}{% endfor %}"),
    "texts of other things": EACH.replace(
        "BODY",
        "{% if m.name is string %}{{ m.name }}{% endif %}"
        "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}",
    ),
}
BOTH = EACH.replace(
    "BODY",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}",
)
SYSTEM_AS_TEXT = EACH.replace(
    "BODY",
    "{% if m.role == 'system' %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}",
)


def part(text: str, **others: str) -> dict[str, str]:
    return {"type": "text", "text": text, **others}


def render(messages: Any, template: str, **options: Any) -> str:
    options = {"add_generation_prompt": False, **options}
    return chat_text(TOKENIZER, messages, chat_template=template, **options)


def transformers_render(messages: Any, template: str, **options: Any) -> str:
    text: str = TOKENIZER.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    return text


def chat(*contents: Any, first: str = "user") -> list[dict[str, Any]]:
    roles = ("user", "assistant") if first == "user" else ("system", "user", "assistant")
    return [{"role": roles[i % len(roles)], "content": c} for i, c in enumerate(contents)]


@pytest.mark.parametrize("name", PARTS)
def test_templates_that_read_parts_get_them(name: str) -> None:
    """Also where content is a text, which such a template leaves out without a word."""
    first = "system" if "system" in name else "user"
    wanted = transformers_render(
        chat([part("a")], [part("b")], [part("c")], first=first), PARTS[name]
    )
    for contents in (("a", "b", "c"), ([part("a")], ["b"], [part("c")])):
        assert render(chat(*contents, first=first), PARTS[name]) == wanted


def test_parts_reach_templates_that_read_both_as_parts() -> None:
    messages = chat([part("a"), part("b")], "c", [part("d")])
    assert render(messages, BOTH) == transformers_render(messages, BOTH)
    assert "<user>ab</user><assistant>c</assistant>" in render(messages, BOTH)


def test_templates_that_read_a_text_get_one() -> None:
    """A list of parts would be written out as Python's."""
    assert render(chat([part("a"), part("b")], "c"), TEXT) == (
        "<user>a\nb</user><assistant>c</assistant>"
    )
    assert '"a\\nb"' in render(chat([part("a"), part("b")]), "{{ messages | tojson }}")


def test_each_role_has_its_form() -> None:
    messages = chat([part("a"), part("b")], "c", first="system")
    assert render(messages, SYSTEM_AS_TEXT) == "<system>a\nb</system><user>c</user>"


def test_a_stated_form_is_used_for_all() -> None:
    messages = chat("a")
    assert render(messages, BOTH, content_format="openai") == "<user>a</user>"
    shown = render(messages, "{{ messages[0].content }}", content_format="openai")
    assert shown == "[{'type': 'text', 'text': 'a'}]"
    with pytest.raises(ValueError, match="content_format='xml': use auto, string, openai"):
        render(messages, TEXT, content_format="xml")


def test_fields_of_parts_reach_the_template() -> None:
    template = EACH.replace("BODY", "{{ m.content[0].lang }}: {{ m.content[0].text }}")
    assert render(chat([part("a", lang="de")]), template) == "<user>de: a</user>"


@pytest.mark.parametrize("role", ["user", "developer", "asistant"])
def test_a_template_that_loses_a_text_is_refused(role: str) -> None:
    """Both ways: the role is one that it passes over."""
    template = "{% for m in messages if m.role in roles %}{{ m.content }}{% endfor %}"
    known = {"user": ["assistant"]}.get(role, ["user", "assistant", "system"])
    messages = [*chat("a"), {"role": role, "content": "lost"}]
    template = template.replace("roles", json.dumps(known))
    with pytest.raises(ValueError, match=f"message .: the chat template leaves out .* '{role}'"):
        render(messages, template)
    assert render([{"role": known[0], "content": "a"}], template) == "a"


def test_a_template_that_needs_a_requests_variables() -> None:
    template = "{{ raise_exception('no x') if not x }}" + PARTS["alias"]
    assert render(chat("a"), template, chat_template_kwargs={"x": 1}) == "<user>a</user>"
    with pytest.raises(ValueError, match="the chat template refused the messages: no x"):
        render(chat("a"), template)


def test_images_are_refused_without_showing_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}
    with pytest.raises(ValueError, match="of type 'image_url' is not supported: text only") as info:
        render(chat([part("a"), image]), TEXT)
    assert len(str(info.value)) < 300


CALLS = {
    "object": "{% for t in m.tool_calls or [] %}[{{ t.function.name }} "
    "{{ t.function.arguments | tojson }}]{% endfor %}{{ m.content or '' }}",
    "items": "{% for t in m.tool_calls or [] %}[{{ t.function.name }}"
    "{% for k, v in t.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{{ m.content }}",
    "text": "{% for t in m.tool_calls or [] %}{{ '[' + t.function.name + ' ' "
    "+ t.function.arguments + ']' }}{% endfor %}{{ m.content or '' }}",
    "printed": "{% for t in m.tool_calls or [] %}[{{ t.function.name }} {{ t.function.arguments }}]"
    "{% endfor %}{{ m.content or '' }}",
    "flat": "{% for t in m.tool_calls or [] %}[{{ t.name }} {{ t.arguments | tojson }}]{% endfor %}"
    "{{ m.content or '' }}",
    "content is none": "{% if m.role == 'assistant' and m.content is none %}"
    "{% for t in m.tool_calls %}[{{ t.function.name }} {{ t.function.arguments | tojson }}]"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}",
    "content has to be there": "{{ '' + m.content }}{% for t in m.tool_calls or [] %}"
    "[{{ t.function.name }} {{ t.function.arguments | tojson }}]{% endfor %}",
    "ids of nine": "{% for t in m.tool_calls or [] %}{% if t.id | length != 9 %}"
    "{{ raise_exception('id') }}{% endif %}[{{ t.function.name }} "
    "{{ t.function.arguments | tojson }}]{% endfor %}{{ m.content or '' }}",
}
ARGUMENTS = {"city": "Köln", "days": 2}


def with_call(content: Any, arguments: Any) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if content == "absent":
        del answer["content"]
    call = {"name": "weather", "arguments": arguments}
    answer["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": call}]
    return [{"role": "user", "content": "u"}, answer, {"role": "tool", "content": "rain"}]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("content", [None, "", "absent", []])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_are_kept(name: str, content: Any, as_text: bool) -> None:
    """In the form that the template reads, whatever a client wrote."""
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    messages = with_call(content, text if as_text else ARGUMENTS)
    shown = "city=Köln days=2" if name == "items" else text
    wanted = f"<user>u</user><assistant>[weather {shown}]</assistant><tool>rain</tool>"
    assert render(messages, EACH.replace("BODY", CALLS[name])) == wanted


@pytest.mark.parametrize("calls", [[], None, "absent"])
@pytest.mark.parametrize("content", ["answer", [part("answer")]])
def test_no_calls_are_none(calls: Any, content: Any) -> None:
    """As clients echo answers: templates ask ``'tool_calls' in message``, or whether it is so."""
    template = EACH.replace(
        "BODY",
        "{% if 'tool_calls' in m %}{{ raise_exception('one call at once') "
        "if m.tool_calls | length != 1 }}{% else %}{{ m.content }}{% endif %}",
    )
    messages = chat("u", content)
    if calls != "absent":
        messages[1]["tool_calls"] = calls
    assert render(messages, template) == "<user>u</user><assistant>answer</assistant>"


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_answers_without_text_are_empty(content: Any) -> None:
    messages = chat("u", content)
    if content == "absent":
        del messages[1]["content"]
    assert render(messages, TEXT) == "<user>u</user><assistant></assistant>"


def test_templates_that_lose_calls_are_refused() -> None:
    with pytest.raises(ValueError, match=r"message 1: .* leaves out tool calls: write"):
        render(with_call(None, {}), TEXT)
    either = EACH.replace(
        "BODY",
        "{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls[0].function | tojson }}"
        "{% endif %}",
    )
    assert '"weather"' in render(with_call(None, {}), either)
    with pytest.raises(ValueError, match=r"message 1: .* leaves out tool calls beside a text"):
        render(with_call("text", {}), either)


FIRST_PART = EACH.replace(
    "BODY", "{{ m.content if m.content is string else m.content[0].text if m.content[0] }}"
)


@pytest.mark.parametrize("first", ["user", "system"])
def test_parts_are_joined_for_templates_that_read_the_first(first: str) -> None:
    """Also where such a template reads no texts."""
    messages = chat([part("a"), part("b")], "c", first=first)
    for template in (FIRST_PART, PARTS["index"]):
        assert "a\nb" in render(messages, template)


def one_call(name: str = "weather", arguments: Any = None, **others: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": ARGUMENTS if arguments is None else arguments}
    return {"role": "assistant", "tool_calls": [{"function": function}], **others}


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        ("{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls }}{% endif %}", "calls"),
        ("{{ m.tool_calls or m.content }}", "a text beside tool calls"),
        ("{{ m.tool_calls[0].function if m.tool_calls }}{{ m.content }}", "tool call 2 of 2"),
    ],
)
def test_all_that_a_message_with_calls_says_is_kept(body: str, lost: str) -> None:
    """Its name and values stand elsewhere, too, so that finding them shows nothing."""
    answer = one_call(content="look")
    if "2 of 2" in lost:
        answer["tool_calls"] *= 2
    messages = [*chat("weather city Köln 2 look"), answer]
    with pytest.raises(ValueError, match=f"message 1: the chat template leaves out .*{lost}"):
        render(messages, EACH.replace("BODY", body))
    whole = EACH.replace("BODY", "{{ m.content }}{% for t in m.tool_calls %}{{ t }}{% endfor %}")
    assert "Köln" in render(messages, whole).split("look")[-1]


def test_a_name_may_be_kept_in_the_id() -> None:
    body = "{% for t in m.tool_calls or [] %}{{ t.id }}({{ t.function.arguments }}){% endfor %}"
    template, result = EACH.replace("BODY", "{{ m.name }}{{ m.content }}" + body), {"role": "tool"}
    for name, works in (("functions.weather:0", True), ("functions.w:0", False)):
        call = one_call()
        call["tool_calls"][0]["id"] = name
        messages = [*chat("u"), call, {**result, "name": "weather", "content": "rain"}]
        if works:
            assert "functions.weather:0(" in render(messages, template)
            continue
        with pytest.raises(ValueError, match="message 1: the chat template leaves out tool calls"):
            render(messages, template)


def test_arguments_have_to_be_kept() -> None:
    template = EACH.replace("BODY", "{{ m.tool_calls[0].function.name if m.tool_calls }}"
                            "{{ m.content }}")  # fmt: skip
    messages = [*chat("Köln 2"), one_call()]
    with pytest.raises(ValueError, match="message 1: the chat template leaves out tool calls"):
        render(messages, template)
    assert "weather" in render([*chat("u"), one_call(arguments={})], template)


def test_results_that_name_their_call() -> None:
    template = EACH.replace(
        "BODY",
        "{% if m.role == 'tool' %}{{ m.name.strip() + m.tool_call_id.strip() }}="
        "{{ m.content if m.content is string else m.content | tojson }}{% else %}"
        "{{ m.content }}{{ m.tool_calls }}{% endif %}",
    )
    result = {"role": "tool", "name": "f", "tool_call_id": "1", "content": '{"sky": "rain"}'}
    assert '<tool>f1={"sky": "rain"}</tool>' in render([*chat("u"), one_call(), result], template)


@pytest.mark.parametrize(
    ("template", "messages", "position"),
    [  # the system's text goes with a question that is last; only the first message may be one
        ("{% for m in messages if m.role != 'system' %}{{ messages[0].content if loop.last and "
         "m.role == 'user' }}{{ m.content }}{% endfor %}", chat("a", "a?", "b", first="system"), 0),
        ("{% for m in messages %}{{ m.content if loop.first or m.role != 'system' }}{% endfor %}",
         [*chat("rule", first="system"), *chat("rule", "u", first="system")], 1),
    ],
)  # fmt: skip
def test_a_text_that_is_lost_where_it_stands(template: str, messages: Any, position: int) -> None:
    with pytest.raises(ValueError, match=f"message {position}: .* leaves out .* where it stands"):
        render(messages, template)
    render(messages[position : position + 2], template)


def test_calls_that_a_prompt_would_lose() -> None:
    shown = "{{ m.content }}{{ m.tool_calls if not (loop.last and add_generation_prompt) }}"
    template, messages = EACH.replace("BODY", shown), [*chat("u"), one_call()]
    assert "weather" in render(messages, template)
    with pytest.raises(ValueError, match="message 1: the chat template leaves out tool calls"):
        render(messages, template, add_generation_prompt=True)


def test_an_empty_list_is_an_empty_text() -> None:
    assert render(chat("u", []), FIRST_PART) == "<user>u</user><assistant></assistant>"


@pytest.mark.parametrize("arguments", ["{broken", "[" * 100_000])
def test_arguments_that_are_not_json(arguments: str) -> None:
    with pytest.raises(ValueError, match="message 1: arguments of a tool call are not JSON"):
        render(with_call(None, arguments), EACH.replace("BODY", CALLS["object"]))


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{% generation %}{{ a }}{% endgeneration %}", True),
        ("{%+ generation %}{{ a }}{%- endgeneration +%}", True),
        ("{%generation%}{{ a }}{%endgeneration%}", True),
        ("{% if a %}{% for b in a %}{%-\n generation %}x{% endgeneration %}{% endfor %}{% endif %}",
         True),
        ("{# {% generation %} #}{{ a }}", False),
        ("{% raw %}{% generation %}{% endraw %}", False),
        ("{{ '{% generation %}' }}", False),
        ("{% set generation = 1 %}{% break %}", False),
        ("{% broken", False),
    ],
)  # fmt: skip
def test_marks_are_found_in_the_parsed_template(template: str, marks: bool) -> None:
    assert marks_answers(template) is marks


def test_several_named_templates() -> None:
    """The one that transformers would take decides: for requests with tools it is another."""
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0})),
        chat_template={
            "default": EACH.replace(
                "BODY", "{%+ generation %}{% for c in m.content %}{{ c.text }}{% endfor %}"
                "{% endgeneration %}",
            ),
            "tool_use": TEXT,
        },
    )  # fmt: skip
    answered = chat_answers(tokenizer, chat("ab"), add_generation_prompt=False)
    assert answered.spans == ((6, 8),)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert not Rendering(tokenizer, tools=tools).has_marks
    assert chat_text(tokenizer, chat([part("a"), part("b")]), tools=tools) == "<user>a\nb</user>"
    assert chat_text(tokenizer, chat("a"), chat_template="tool_use") == "<user>a</user>"


def test_rows_of_tables_are_refused_or_rendered_as_other_records() -> None:
    """A row of `datasets` has null for keys of other rows; no part, call or schema has any."""
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}{% if m.tool_calls %}"
        "{{ m.tool_calls | tojson }}{% else %}{% for c in m.content %}"
        "{% if 'image' in c %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )

    def record(nulls: bool, arguments: Any, schemas: Any) -> tuple[Any, Any]:
        others = {"image": None} if nulls else {}
        call = {"function": {"name": "f", "arguments": arguments, **others}, **others}
        parameters = {"type": "object", "properties": schemas}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        content = [{"type": "text", "text": "hi", **others}]
        asked = {"role": "user", "content": content, **others}
        return [asked, {"role": "assistant", "tool_calls": [call], **others}], tools

    schemas = {"n": {"type": "integer", "default": None, "enum": [1, None]}, "default": {}}
    for arguments in ({"n": None}, {"n": [{"m": None}]}, '{"q": null}'):
        (row, tools), (messages, _) = (record(x, arguments, schemas) for x in (True, False))
        assert render(row, template, tools=tools, refuses_nulls=True) == render(
            messages, template, tools=tools
        )
        assert "hi" in render(row, template, tools=tools)
    for bad, path in (
        ({"n": {"type": "integer"}, "city": None}, "properties.city"),
        ({"n": {"type": "integer", "enum": None}}, "properties.n.enum"),
        ({"n": {"anyOf": [{"items": {"properties": {"m": None}}}]}}, "n.anyOf.items.properties.m"),
        ({"default": None}, "properties.default"),
    ):
        messages, tools = record(False, {"n": 1}, bad)
        with pytest.raises(ValueError, match=rf"tools\[0\].*{path}.*null.*leave keys"):
            render(messages, template, tools=tools, refuses_nulls=True)
        assert "null" in render(messages[:1], template, tools=tools)  # as transformers
    messages, tools = record(False, {"n": 1, "city": None}, schemas)
    with pytest.raises(ValueError, match=r"message 1: argument 'city'.*'f'.*null"):
        render(messages, template, tools=tools, refuses_nulls=True)
    with pytest.raises(ValueError, match="chat_template_kwargs: 'x' is null"):
        render(messages[:1], template, chat_template_kwargs={"x": None}, refuses_nulls=True)
    shown = "{{ x is none }}{{ messages[0].content[0].text }}"
    assert render(messages[:1], shown, chat_template_kwargs={"x": None}) == "Truehi"


def test_a_file_of_a_template_may_be_json(tmp_path: Path) -> None:
    """Rendered as it is, JSON would be a part of every prompt."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": template}))
    assert load_chat_template(str(file)) == template
    for stated in ({"chat_template": {"default": template}}, {"bos_token": "{{ 1 }}"}, [template]):
        file.write_text(json.dumps(stated))
        with pytest.raises(ValueError, match="is JSON whose chat_template is no text"):
            load_chat_template(str(file))


NAMES = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
OLD_CALLS = NAMES.replace("{% endfor %}", "{{ m.function_call }}{{ m.refusal }}{% endfor %}")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"function_call": {"name": "get", "arguments": '{"city": "Rome"}'}}, "give tool_calls"),
        ({"function_call": {"name": "get", "arguments": {}}, "content": "So."}, "give tool_calls"),
        ({"refusal": "I cannot."}, "the refusal: write it as the content"),
        ({"refusal": "I <b>cannot</b>.", "content": ""}, "the refusal"),
    ],
)
def test_what_other_fields_say_is_kept(fields: dict[str, Any], problem: str) -> None:
    """OpenAI's messages say some things outside of their content."""
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", **fields}]
    with pytest.raises(ValueError, match=f"message 1: .* leaves out .*{problem}"):
        chat_text(TOKENIZER, messages, chat_template=NAMES)
    text = chat_text(TOKENIZER, messages, chat_template=OLD_CALLS)
    assert all(str(one) in text for one in fields.values())
    empty = {**messages[1], "function_call": None, "refusal": None, "content": "There."}
    chat_text(TOKENIZER, [messages[0], empty], chat_template=NAMES)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"audio": {"id": "a1"}}, "audio=.* is not supported: text only"),
        ({"images": ["cat.png"]}, "images=.* is not supported"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "has no text in .name."),
        ({"tool_calls": [{"function": {"name": " "}}]}, "has no text in .name."),
        ({"tool_calls": [{"function": {"name": "f", "arguments": '"{}"'}}]}, "the JSON of a text"),
    ],
)
def test_what_no_template_can_say_is_refused(fields: dict[str, Any], problem: str) -> None:
    messages = [{"role": "assistant", "content": "A", **fields}]
    with pytest.raises(ValueError, match=f"message 0: .*{problem}"):
        chat_text(TOKENIZER, messages, chat_template=OLD_CALLS)
    chat_text(TOKENIZER, [{"role": "user", "content": "A", "images": []}], chat_template=NAMES)


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if FIELD %}<think>{{ FIELD }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "read", ["m.reasoning_content", "m['reasoning']", "m.get('thinking')", "m.thinking"]
)
def test_reasoning_reaches_the_field_that_is_read(field: str, read: str) -> None:
    """vLLM's replies have it in another field than most templates read."""
    template = THINKS.replace("FIELD", read)
    messages = [*chat("How?"), {"role": "assistant", "content": "So.", field: "Hm."}]
    assert render(messages, template) == "<user>How?<assistant><think>Hm.</think>So."
    assert chat_answers(
        TOKENIZER, messages, chat_template=template, add_generation_prompt=False
    ).text.endswith("<think>Hm.</think>So.")


def test_reasoning_is_moved_only_where_it_would_be_lost() -> None:
    both = {"role": "assistant", "content": "So.", "reasoning": "A", "reasoning_content": "B"}
    template = THINKS.replace("FIELD", "m.reasoning_content")
    assert render([*chat("How?"), both], template).endswith("<think>B</think>So.")
    bare = EACH.replace("BODY", "{{ m | tojson }}")
    assert '"reasoning"' not in render([{**both, "reasoning": None}], bare)


WRITES = (
    "{{ tools }}{{ day }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "value", [datetime.date(2026, 1, 2), Decimal("1.5"), b"a", {1}, np.array([1]),
              np.datetime64("2026-01-02")],
)  # fmt: skip
def test_values_that_would_be_written_as_their_type_are_refused(value: Any) -> None:
    """Tables have times and decimals, of which transformers writes the name of the type."""
    call = {"function": {"name": "f", "arguments": {"k": [value]}}}
    tool = {"function": {"name": "f", "parameters": {"default": value}}}
    for messages, options in (
        ([*chat("a"), {"role": "assistant", "tool_calls": [call]}], {}),
        (chat("a"), {"tools": [tool]}),
        (chat("a"), {"chat_template_kwargs": {"day": value}}),
    ):
        with pytest.raises(ValueError, match="has no form in a prompt"):
            render(messages, WRITES, **options)
    unread = [{"role": "user", "content": "a", "created": value, "score": np.float32(0.5)}]
    assert render(unread, WRITES).endswith("<user>a")


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("{{ messages }}", ["tools", "chat_template_kwargs.thinking", "chat_template_kwargs.mood"]),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ thinking }}",
         ["chat_template_kwargs.mood"]),
        ("{% macro all() %}{{ tools or [] }}{{ mood }}{% endmacro %}{% generation %}{{ all() }}"
         "{% endgeneration %}{% for thinking in messages %}{{ thinking }}{% endfor %}",
         ["chat_template_kwargs.thinking"]),
    ],
)  # fmt: skip
def test_fields_that_a_template_does_not_read(template: str, unread: list[str]) -> None:
    options = {"tools": [{"function": {"name": "f"}}], "chat_template": template}
    variables = {"thinking": True, "mood": "calm"}
    found = unread_fields(TOKENIZER, **options, chat_template_kwargs=variables)  # type: ignore[arg-type]
    assert found == unread
    assert unread_fields(TOKENIZER, chat_template="{{ messages }}", tools=[]) == []
