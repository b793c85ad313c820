"""Special tokens of a tokenizer: added to texts unless refused, and noticed if they are double."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from tests.extract.job_harness import run, write_jsonl
from vllm import LLM, AsyncLLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.hidden_states import ExtractRequest, HiddenStatesDataset
from vllm.transformers_utils import tokenizer as tokenizer_module
from vllm.transformers_utils.tokenizer import get_tokenizer

BOS = "<|im_start|>"
TEXTS = ["abc", f"{BOS}abc", "", f"a{BOS}{BOS}"]


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer begins each text with BOS."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(tiny_llama, folder)
    tokenizer = get_tokenizer(str(folder))
    tokenizer.bos_token = BOS  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id or 0)]
    )
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def ids_of(model: Path, text: str, adds: bool) -> list[int]:
    tokenizer = get_tokenizer(str(model))
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    assert tokenizer.bos_token_id is not None
    return [tokenizer.bos_token_id] * adds + ids


@pytest.mark.parametrize("adds", [True, False])
def test_a_dataset(
    adds: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[1]]
    chat = [{"role": "user", "content": "x"}]  # its template writes what begins it
    records = [*({"text": text} for text in texts), {"messages": chat}]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    run(model, data, tmp_path / "output", add_special_tokens=adds)
    samples = list(HiddenStatesDataset(tmp_path / "output"))
    assert [one.token_ids.tolist() for one in samples[:4]] == [
        ids_of(model, text, adds) for text in texts
    ]
    assert samples[4].token_ids.tolist() == ids_of(model, f"{BOS}user\nx<|im_end|>\n", False)
    told = re.findall(r"second BOS +(\d+) texts\n", capsys.readouterr().out)
    assert told == (["2", "2"] if adds else [])  # in the plan and at the end
    with pytest.raises(ValueError, match="add_special_tokens"):
        run(model, data, tmp_path / "output", add_special_tokens=not adds)


def test_it_is_told_once(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tokenizer_module.logger.__dict__, "_logged_once", set())
    with LLM(str(model), max_model_len=64, kv_cache_memory_bytes=2**22) as llm:
        assert len(list(llm.extract([TEXTS[0], f"x{BOS}"], [1]))) == 2
        assert "another one" not in caplog.text
        samples = list(llm.extract([TEXTS[1]] * 3, [1]))
    assert caplog.text.count("the tokenizer adds another one") == 1
    assert samples[0].token_ids.tolist() == ids_of(model, TEXTS[1], True)


def test_extract_in_python(model: Path) -> None:
    requests = [
        TEXTS[1],
        ExtractRequest(TEXTS[0], add_special_tokens=True),
        ExtractRequest(TEXTS[0], add_special_tokens=False),
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    chat = ids_of(model, f"{BOS}user\nx<|im_end|>\n", False)
    engine = {"max_model_len": 64, "kv_cache_memory_bytes": 2**22}

    def expected(adds: bool) -> list[list[int]]:
        texts = (TEXTS[1], adds), (TEXTS[0], True), (TEXTS[0], False)
        return [*(ids_of(model, text, one) for text, one in texts), chat]

    with LLM(str(model), **engine) as llm:
        for adds in (True, False):
            samples = llm.extract(requests, [1], add_special_tokens=adds)
            assert [one.token_ids.tolist() for one in samples] == expected(adds)

    async def read() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **engine))
        try:
            samples = llm.extract(requests, [1], add_special_tokens=False)
            return [one.token_ids.tolist() async for one in samples]
        finally:
            await llm.shutdown()

    assert asyncio.run(read()) == expected(False)
