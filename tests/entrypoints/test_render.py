"""The render endpoints: what would be run, without running it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from vllm import LLM
from vllm.entrypoints.openai.state import ServerState

CONVERSATION = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
]
FIELDS = {
    *("request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params"),
    *("model", "reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode"),
    *("stream", "stream_options", "cache_salt", "priority", "kv_transfer_params"),
    "ec_transfer_params",
}


def render(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions/render", json=body)
    assert response.status_code == 200, response.text
    rendered: dict[str, Any] = response.json()
    return rendered


def test_a_conversation_is_rendered_as_it_would_be_run(http: httpx.Client, reference: LLM) -> None:
    tokenizer = reference.get_tokenizer()
    prompt = render(http, messages=CONVERSATION[:1], add_generation_prompt=True)
    full = render(http, messages=CONVERSATION, add_generation_prompt=False)
    assert set(prompt) == FIELDS
    assert prompt["request_id"].startswith("chatcmpl-") and prompt["model"] == "tiny"
    assert prompt["output_mode"] == "tokens" and prompt["stream"] is False
    wanted = "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    encode = {"add_special_tokens": False, "verbose": False}
    assert prompt["token_ids"] == tokenizer.encode(wanted, **encode)
    assert full["token_ids"] == tokenizer.encode(wanted + "answer<|im_end|>\n", **encode)
    assert full["token_ids"][: len(prompt["token_ids"])] == prompt["token_ids"]
    assert prompt["sampling_params"]["max_tokens"] == 512 - len(prompt["token_ids"])
    assert not any(name.startswith("_") for name in prompt["sampling_params"])


def test_truncation_as_prepare_data_asks_for_it(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "long " * 200}]
    cut = render(http, messages=messages, truncate_prompt_tokens=256, truncation_side="right")
    whole = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert cut["token_ids"] == whole[:256]
    assert render(http, messages=messages, truncate_prompt_tokens=9)["token_ids"] == whole[-9:]
    tail = render(http, messages=messages, truncate_prompt_tokens=-1, max_tokens=12)
    assert tail["token_ids"] == whole[-500:]
    refused = {"messages": messages, "truncate_prompt_tokens": 512}
    assert http.post("/v1/chat/completions/render", json=refused).status_code == 400


def test_completions_are_a_list(http: httpx.Client) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "stop": "x", "kv_transfer_params": {"a": 1}}
    rendered = http.post("/v1/completions/render", json=body).json()
    assert [one["token_ids"] for one in rendered] == [[64, 65], [66]]
    for one in rendered:
        assert set(one) == FIELDS
        assert one["sampling_params"]["max_tokens"] == 3
        assert one["sampling_params"]["stop"] == ["x"]
        assert one["kv_transfer_params"] == {"a": 1}


def test_many_prompts_are_not_checked_on_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    beside_loop = ServerState.beside_loop

    async def counted(state: ServerState, *arguments: Any) -> Any:
        calls.append(arguments)
        return await beside_loop(state, *arguments)

    monkeypatch.setattr(ServerState, "beside_loop", counted)
    for num_prompts, num_tokens, expected in ((1, 400, 0), (8, 400, 0), (400, 1, 1), (11, 400, 1)):
        calls.clear()
        body = {"prompt": [[5] * num_tokens] * num_prompts, "max_tokens": 1}
        assert len(http.post("/v1/completions/render", json=body).json()) == num_prompts
        assert len(calls) == expected


def test_continuing_the_last_message(http: httpx.Client) -> None:
    rendered = render(http, messages=CONVERSATION, continue_final_message=True)
    text = http.post("/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nanswer")
