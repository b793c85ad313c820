"""Loading tokenizers from folders, with and without files."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import CTRLConfig, LlamaConfig, Qwen2Config

from tests.engine.frontend_harness import byte_level_tokenizer, make_config
from tests.transformers_utils.test_answer_masks import RawBytes
from vllm.transformers_utils.chat_template import render_chat
from vllm.transformers_utils.tokenizer import get_tokenizer, load_tokenizer, stated_in_full


def load(folder: Path, **changes: Any) -> tuple[Any, str]:
    named = {"model": str(folder), "tokenizer": str(folder), **changes}
    config = make_config(skip_tokenizer_init=False, **named)
    return load_tokenizer(config.model_config)


def test_round_trip(tmp_path: Path) -> None:
    saved = byte_level_tokenizer()
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path)
    saved.save_pretrained(tmp_path)
    tokenizer, reason = load(tmp_path)
    assert reason == ""
    assert tokenizer.encode("hello ✓", add_special_tokens=True, verbose=False) == saved.encode(
        "hello ✓"
    )
    assert tokenizer.chat_template == saved.chat_template


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, CTRLConfig])
def test_a_folder_without_one(
    tmp_path: Path,
    config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config(vocab_size=320).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        tokenizer, reason = load(tmp_path)
    assert tokenizer is None
    assert str(tmp_path) in reason
    assert "Prompts have to be token ids" in caplog.text
    with pytest.raises(ValueError, match=f"no tokenizer could be loaded from '{tmp_path}'"):
        load(tmp_path, model="another")


def test_a_revision_of_the_model_has_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of a text were those of the branch ``main``, whatever the model's revision was."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    saved, word = byte_level_tokenizer(), "zqzq"
    assert (apart := len(saved.encode(word))) > 1
    cache = tmp_path / "models--me--tiny"
    (cache / "refs").mkdir(parents=True)
    for commit, branch in (("a" * 40, "main"), ("b" * 40, "later")):
        LlamaConfig(vocab_size=321).save_pretrained(folder := cache / "snapshots" / commit)
        saved.save_pretrained(folder)
        (cache / "refs" / branch).write_text(commit)
        saved.add_tokens([word])
    hub_id = {"model": "me/tiny", "tokenizer": "me/tiny"}

    def num_tokens(**options: Any) -> int:
        tokenizer, reason = load(tmp_path, **hub_id | options)
        assert reason == ""
        return len(tokenizer.encode(word, add_special_tokens=False))

    assert num_tokens() == num_tokens(revision="main") == num_tokens(revision="a" * 40) == apart
    assert num_tokens(revision="later") == num_tokens(revision="b" * 40) == 1
    assert num_tokens(tokenizer_revision="later") == 1
    assert num_tokens(revision="later", tokenizer_revision="main") == apart
    assert num_tokens(model="other", revision="later") == apart  # a revision of the other
    with pytest.raises(ValueError, match="from 'me/tiny', revision='nowhere'"):
        num_tokens(tokenizer_revision="nowhere")
    # Tokenizers with code of their own may read settings that are known to no one else.
    monkeypatch.setattr("vllm.transformers_utils.tokenizer._own_code", lambda _: {"own.py": ""})
    shutil.copytree(cache / "snapshots" / ("a" * 40), other := cache / "snapshots" / ("c" * 40))
    file = other / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 77}))
    first, same, third = (
        stated_in_full(get_tokenizer("me/tiny", revision=one))
        for one in ("main", "a" * 40, "c" * 40)
    )
    assert first == same != third


def test_the_token_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private tokenizer needs it as the model's other files do."""
    seen: list[Any] = []

    def from_pretrained(_: str, **options: Any) -> Any:
        seen.append(options["token"])
        return byte_level_tokenizer()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    for token in ("hf_1", None):
        load(tmp_path, hf_token=token)
    assert seen == ["hf_1", None]


def test_skipped_and_unknown_mode(tmp_path: Path) -> None:
    config = make_config(skip_tokenizer_init=True)
    assert load_tokenizer(config.model_config) == (None, "skip_tokenizer_init=True")
    with pytest.raises(ValueError, match="tokenizer_mode='slow'"):
        get_tokenizer(str(tmp_path), tokenizer_mode="slow")


@pytest.mark.parametrize("file_name", ["chat_template.json", "processor_config.json"])
def test_the_template_that_a_processor_was_saved_with(
    tmp_path: Path,
    file_name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    saved = byte_level_tokenizer()
    saved.chat_template = None
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path)
    saved.save_pretrained(tmp_path)
    assert get_tokenizer(str(tmp_path)).chat_template is None
    for content, template, warning in (
        ("{", None, "has no chat template that can be read: JSONDecodeError: Expecting property"),
        ("[1]", None, ""),
        ('{"chat_template": [{"name": "default"}]}', None, "can be read: KeyError: 'template'"),
        ('{"chat_template": "{{ 1 }}"}', "{{ 1 }}", ""),
        ('{"chat_template": [{"name": "a", "template": "{{ 1 }}"}]}', {"a": "{{ 1 }}"}, ""),
    ):
        (tmp_path / file_name).write_text(content)
        caplog.clear()
        assert get_tokenizer(str(tmp_path)).chat_template == template
        assert warning in caplog.text and bool(warning) == (file_name in caplog.text)
    saved.chat_template = "{{ 2 }}"
    saved.save_pretrained(tmp_path)
    assert get_tokenizer(str(tmp_path)).chat_template == "{{ 2 }}"


OWN = """
from .own_rules import STEP
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.txt"}

    def __init__(self, vocab_file=None, shift=0, **options):
        self.shift = STEP + shift + len(open(vocab_file).read())
        super().__init__(**options)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)}

    def _tokenize(self, text, **options):
        return [chr((ord(one) + self.shift) % 256) for one in text]

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)
"""


def test_what_a_tokenizer_with_its_own_code_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same vocabulary cuts texts otherwise with other code, settings or files."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    map_to = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}

    def made(name: str, step: int = 1, shift: int = 0, rules: str = "a") -> tuple[Any, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = {"tokenizer_class": "OwnTokenizer", "auto_map": map_to, "shift": shift}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenization_own.py").write_text(OWN)
        (folder / "own_rules.py").write_text(f"STEP = {step}")
        (folder / "own.txt").write_text(rules)
        tokenizer: Any = get_tokenizer(str(folder), trust_remote_code=True)
        return tokenizer.encode("hello", add_special_tokens=False), stated_in_full(tokenizer)

    before = made("first")
    assert made("elsewhere") == before
    for change in ({"step": 2}, {"shift": 3}, {"rules": "abcde"}):
        ids, stated = made("first", **change)
        assert ids != before[0] and stated != before[1], change


def test_what_a_tokenizer_depends_on_beside_its_words(tmp_path: Path) -> None:
    """Settings of tokenizer_config.json change chats and tokens, but not tokenizer.json."""
    saved = byte_level_tokenizer()
    saved.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    saved.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())

    def made(**changes: Any) -> tuple[Any, str]:
        file.write_text(json.dumps({**settings, **changes}))
        tokenizer: Any = get_tokenizer(str(tmp_path))
        prompt = render_chat(tokenizer, [{"role": "user", "content": "hello <|im|>"}])
        return prompt, stated_in_full(tokenizer)

    before = made()
    assert made() == before
    for change in (
        {"bos_token": "<|end|>"},
        {"eos_token": "<|im|>"},
        {"pad_token": "<|end|>"},
        {"split_special_tokens": True},
    ):
        prompt, stated = made(**change)
        assert prompt != before[0] and stated != before[1], change


def test_words_may_be_bytes() -> None:
    """As those of Qwen's first tokenizer, which are no keys of JSON."""
    stated = [stated_in_full(RawBytes([b"a", word])) for word in (b"\xff", b"b", b"\xff")]
    assert stated[0] == stated[2] != stated[1]
