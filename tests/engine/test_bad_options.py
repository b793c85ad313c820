"""Options that cannot work are refused with what would, before anything is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from vllm import LLM
from vllm.outputs import RequestOutput

Checkpoint = Callable[..., Path]


def run(llm: LLM, prompt: Any, max_tokens: int) -> RequestOutput:
    (output,) = llm.generate([prompt], greedy(max_tokens), use_tqdm=False)
    return output


def start(folder: Path, **arguments: Any) -> None:
    with engine(folder, **{"max_model_len": 128, **arguments}):
        pass


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([5], r"holds 5, .* ids from 0 .* to 4"),
        ([-1], r"holds -1, .* ids from 0 .* to 4"),
        ([True], "holds True; use whole numbers"),
        (["1"], "holds '1'; use whole numbers"),
        ([1.0], r"holds 1\.0; use whole numbers"),
        ([], r"=\[\] is not a list of at least one layer id"),
        ("12", "='12' is not a list of at least one layer id"),
        (3, "=3 is not a list of at least one layer id"),
        (None, "is missing; give the list of layers"),
    ],
)
def test_layer_ids(checkpoint: Checkpoint, layer_ids: Any, message: str, tmp_path: Path) -> None:
    config = extraction_config([1], tmp_path)
    hf_config = config["speculative_config"]["draft_model_config"]["hf_config"]
    hf_config["eagle_aux_hidden_state_layer_ids"] = layer_ids
    with pytest.raises(ValueError, match=f"eagle_aux_hidden_state_layer_ids.*{message}"):
        start(checkpoint("llama"), **config)


@pytest.mark.parametrize("draft", [{}, {"hf_config": {}}, None, {"hf_config": {"layers": [1]}}])
def test_no_layer_ids(checkpoint: Checkpoint, draft: Any, tmp_path: Path) -> None:
    config = extraction_config([1], tmp_path)
    config["speculative_config"]["draft_model_config"] = draft
    with pytest.raises(ValueError, match=r"draft_model_config\.hf_config.* is missing"):
        start(checkpoint("llama"), **config)


def test_unknown_keys_are_named_with_the_nearest_one(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    ids = "eagle_aux_hidden_state_layer_ids"

    def near(misspelt: str, meant: str, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=f"{misspelt}'.*did you mean '{meant}'"):
            start(folder, **arguments)

    def changed(option: str, key: str, value: Any) -> dict[str, Any]:
        config = extraction_config([1], tmp_path)
        config[option] = {**config[option], key: value}
        return config

    near("max_num_seq", "max_num_seqs", max_num_seq=3)
    near(
        "num_speculativ_tokens",
        "num_speculative_tokens",
        **changed("speculative_config", "num_speculativ_tokens", 1),
    )
    near(
        "hf_confg",
        "hf_config",
        **changed("speculative_config", "draft_model_config", {"hf_confg": {ids: [1]}}),
    )
    near("kv_rol", "kv_role", **changed("kv_transfer_config", "kv_rol", "kv_producer"))
    near(
        "ExampleHiddenStateConnector",
        "ExampleHiddenStatesConnector",
        **changed("kv_transfer_config", "kv_connector", "ExampleHiddenStateConnector"),
    )
    near(
        "num_writer_thread",
        "num_writer_threads",
        **extraction_config([1], tmp_path, num_writer_thread=2),
    )
    typo = {"hf_config": {"eagle_aux_hidden_states_layer_ids": [1]}}
    with pytest.raises(ValueError, match=r"is missing \(there is 'eagle_aux_hidden_states_layer"):
        start(folder, **changed("speculative_config", "draft_model_config", typo))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"block_size": 24}, "block_size=24 is not a positive multiple of 16"),
        ("llama", {"attn_pack_size": 1}, "attn_pack_size=1 .* recurrent layers, which this model"),
        ("qwen3_5", {"attn_pack_size": 3}, r"attn_pack_size=3 is out of range: .* in \[1, 2\]"),
        ("qwen3_5", {"attn_pack_size": 0}, "attn_pack_size=0 is not valid"),
        ("llama", {"max_model_len": 0}, "max_model_len=0 is not valid; use at least 1, or -1"),
        ("llama", {"max_model_len": 513}, "max_model_len=513 .* use at most 512"),
        ("llama", {"max_num_seqs": 0}, "max_num_seqs=0 is not valid"),
        ("llama", {"dtype": "int8"}, "dtype='int8' is not supported; use 'auto'"),
        ("llama", {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 is not valid"),
        (
            "llama",
            {"kv_cache_memory_bytes": "2 apples"},
            "'2 apples' is not valid; use a number",
        ),
        (
            "llama",
            {"hidden_state_cache_bytes": ""},
            "_cache_bytes='' is not valid; use",
        ),
        ("llama", {"num_gpu_blocks_override": 2}, "; or raise num_gpu_blocks_override=2$"),
        ("llama", {"tensor_parallel_size": 60_000}, "=60000 is more than .* heads; use at most 6,"),
        (
            "llama",
            {"pipeline_parallel_size": 1 << 40},
            "parallel_size=1099511627776 is not",
        ),
        ("llama", {"data_parallel_size": 10**30}, "data_parallel_size=10{30} is not valid"),
        ("llama", {"seed": "x" * 5000}, r"^seed='x{50,100}\.\.\.x{50,100}' is not valid"),
        ("llama", {"generation_config": "\ud800"}, r"generation_config='\\ud800': Repo id"),
        (
            "llama",
            {"kv_offloading_size": 1.0, "kv_offloading_backend": ""},
            "kv_offloading_backend='' is not valid; use 'native'",
        ),
    ],
)
def test_options(
    checkpoint: Checkpoint, family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(checkpoint(family), **options)


@pytest.mark.parametrize("name", ["-inf", "\ud800", "a\0b", "x" * 5000])
def test_names_that_no_checkpoint_can_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"^model='.{1,260}: .*(Repo id|File name too long)"):
        LLM(name)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_pool_that_is_too_small_says_what_fits(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    small = {"kv_cache_memory_bytes": 200_000, **extraction_config([1, 2], tmp_path)}
    with pytest.raises(ValueError, match=r"max_model_len=512 tokens: it needs .* MiB") as error:
        start(folder, max_model_len=512, **small)
    found = re.search(r"max_model_len=(\d+) would fit", str(error.value))
    assert found is not None
    fitting = int(found[1])
    assert 16 <= fitting < 512
    (prompt,) = random_prompts(2, [fitting])
    with engine(folder, max_model_len=fitting, **small) as llm:
        assert len(rows_of(run(llm, prompt, 0))) == fitting
    with pytest.raises(ValueError, match=f"max_model_len={fitting + 1} tokens"):
        start(folder, max_model_len=fitting + 1, **small)
    # -1 finds the same length.
    with engine(folder, max_model_len=-1, **small) as llm:
        assert llm.model_config.max_model_len == fitting
        assert len(rows_of(run(llm, prompt, 0))) == fitting
        with pytest.raises(ValueError, match=f"max_model_len={fitting}"):
            run(llm, prompt, 1)


def test_a_pool_without_room_for_a_token(checkpoint: Checkpoint) -> None:
    for length in (-1, 64):
        with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
            start(checkpoint("llama"), max_model_len=length, kv_cache_memory_bytes=1000)


# ---- connectors


PLAIN_CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata,
)


class PlainConnector(KVConnectorBase_V1):
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output): return KVConnectorMetadata()
"""


@pytest.fixture
def plain_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A kv_transfer_config for a connector that is not SupportsHMA."""
    (tmp_path / "plain_connector.py").write_text(PLAIN_CONNECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    return {
        "kv_connector": "PlainConnector",
        "kv_connector_module_path": "plain_connector",
        "kv_role": "kv_producer",
    }


def test_a_connector_without_hma(
    checkpoint: Checkpoint, plain_connector: dict[str, Any], tmp_path: Path
) -> None:
    dense, hybrid = checkpoint("llama"), checkpoint("qwen3_5")
    refused = "'PlainConnector' does not subclass SupportsHMA"
    with pytest.raises(ValueError, match=f"{refused}, but the model has recurrent layers"):
        start(hybrid, kv_transfer_config=plain_connector)
    extracting = {**extraction_config([1], tmp_path), "kv_transfer_config": plain_connector}
    with engine(dense, **extracting) as llm:  # rows in the blocks of the attention layers
        assert run(llm, {"prompt_token_ids": [5, 6]}, 4).finished
    with engine(dense, kv_transfer_config=plain_connector) as llm:
        assert run(llm, {"prompt_token_ids": [5, 6]}, 4).finished


def test_the_connector_needs_extraction(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = extraction_config([1], tmp_path)
    del config["speculative_config"]
    with pytest.raises(ValueError, match="ExampleHiddenStatesConnector needs speculative_config"):
        start(checkpoint("llama"), **config)


def test_a_connectors_options_are_checked_before_the_weights_are_read(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(**_: Any) -> Any:
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr("vllm.v1.worker.gpu_model_runner.get_model", too_late)
    (tmp_path / "file").touch()
    wrong = extraction_config([1], tmp_path, num_writer_threads="many")
    nowhere = extraction_config([1], tmp_path / "file" / "below")
    inside = extraction_config([1], tmp_path)
    inside["kv_transfer_config"] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [wrong["kv_transfer_config"]]},
    }
    for config in (wrong, inside):
        with pytest.raises(ValueError, match=r"num_writer_threads='many' is not valid"):
            start(checkpoint("llama"), **config)
    with pytest.raises(ValueError, match=r"shared_storage_path=.* cannot be written: Not a dir"):
        start(checkpoint("llama"), **nowhere)
