"""New weights for an engine that lives, calls of its workers, and its sleep."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from tests.engine.worker_extension import count_parameters, device_of
from tests.grids import at_night
from tests.models import families
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import load_reference
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.hidden_states import HiddenStatesSample
from vllm.model_executor.utils import LOADABLE_DTYPES
from vllm.v1.engine.core_messages import AbortRequests, CallWorkers, ResetPrefixCache
from vllm.v1.worker.weight_updates import WeightUpdates

Checkpoint = Callable[..., Path]
PROMPTS = random_prompts(61, [5, 40, 17])
EXTENSION = "tests.engine.worker_extension.Extension"
DURING_THE_DAY = ("llama", "qwen3_5_vl", "mixtral", "apertus")
WITH_PARTS = {"minimax", "olmo_hybrid"}
"""Families with a buffer that the engine computes, or with tensors that it reads together only."""
FAMILIES = [
    *DURING_THE_DAY,
    *(at_night(one) for one in families.FAMILIES if one not in DURING_THE_DAY),
]


@pytest.fixture(scope="module")
def other(checkpoint: Checkpoint) -> Callable[[str], Path]:
    """The folder of a checkpoint of the same sizes and other values."""
    return partial(checkpoint, seed=77)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def answer(llm: LLM) -> list[HiddenStatesSample]:
    return list(llm.extract(PROMPTS, [0, 2, 3], sampling_params=greedy(3), top_logprobs=2))


def is_same(samples: list[HiddenStatesSample], others: list[HiddenStatesSample]) -> bool:
    for sample, one in zip(samples, others, strict=True):
        if not torch.equal(sample.token_ids, one.token_ids):
            return False
        for name, tensor in one.tensors.items():
            if not torch.equal(sample.tensors[name].nan_to_num(9), tensor.nan_to_num(9)):
                return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_or_tensors_give_the_rows_of_a_fresh_engine(
    family: str, checkpoint: Checkpoint, other: Callable[[str], Path]
) -> None:
    first, second = checkpoint(family), other(family)
    with engine(second) as llm:
        fresh = answer(llm)
    with engine(first) as llm:
        before = answer(llm)
        llm.update_weights(second)
        assert is_same(answer(llm), fresh) and not is_same(before, fresh)
        llm.update_weights(weights_in(first))
        assert is_same(answer(llm), before)
        with llm.weight_update() as load:
            tensors = weights_in(second)
            one_by_one = [{name: tensor} for name, tensor in tensors.items()]
            for part in [tensors] if family in WITH_PARTS else one_by_one:
                load(part)
        assert is_same(answer(llm), fresh)
        llm.update_weights(first)
        assert is_same(answer(llm), before)


def test_no_request_has_rows_of_old_and_new_weights(
    checkpoint: Checkpoint, other: Callable[[str], Path]
) -> None:
    """Threads extract and generate without a pause while weights come and go."""
    first, second = checkpoint("qwen3_5"), other("qwen3_5")
    with engine(second) as llm:
        allowed = [answer(llm)]
    with engine(first, max_num_batched_tokens=16) as llm:
        allowed.append(answer(llm))
        wrong: list[str] = []
        seen: set[int] = set()
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                for i, sample in enumerate(answer(llm)):
                    found = [k for k, one in enumerate(allowed) if is_same([sample], [one[i]])]
                    seen.update(found)
                    if not found:
                        wrong.append(f"prompt {i}")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            llm.update_weights(second)
            llm.update_weights(weights_in(first))
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong and seen == {0, 1}


def test_what_does_not_fit_changes_nothing(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, weights = checkpoint("llama"), weights_in(other("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    small = make_checkpoint(tmp_path / "small", "llama", intermediate_size=96)
    with engine(folder) as llm:
        before = answer(llm)
        for bad, message in (
            ({**weights, name: weights[name][:, :-1]}, rf"weight '{name}' has the shape \(72, "),
            ({name: "text"}, "is not the name of a tensor"),
            (
                {**weights, name: weights[name].double()},
                rf"'{name}' is of torch.float64, .* of float32",
            ),
            ({**weights, name: weights[name].long()}, "is of torch.int64"),
            ({**weights, name: weights[name].to("meta")}, "on meta: use a dense tensor"),
            ({**weights, name: weights[name].to_sparse()}, "torch.sparse_coo on cpu"),
            ([*weights.items(), (name, weights[name])], f"weights: '{name}' comes twice"),
            ([(name, weights[name], 1)], "weights: a tuple is not the pair of a name and a tensor"),
            (weights[name], "weights: a Tensor cannot be used; give a folder, or tensors by name"),
            (None, "weights: a NoneType cannot be used"),
            (small, r"has the shape .*; the model's is"),
            ("/there/is/none", "/there/is/none"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.update_weights(bad)  # type: ignore[arg-type]
            assert is_same(answer(llm), before)


def test_a_folder_whose_config_computes_other_values_is_refused(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    first = shutil.copytree(checkpoint("gemma2"), tmp_path / "first")
    second = shutil.copytree(other("gemma2"), tmp_path / "second")
    config = json.loads((second / "config.json").read_text())
    with engine(second) as llm:
        fresh = answer(llm)
    with engine(first) as llm:
        before = answer(llm)
        for name, value in (
            ("rms_norm_eps", 0.3),
            ("sliding_window", 3),
            ("attn_logit_softcapping", 1.0),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}),
        ):
            for folder, given in ((second, second), (first, None)):
                (folder / "config.json").write_text(json.dumps(config | {name: value}))
                with pytest.raises(ValueError, match=f"config.json of the weights has {name}="):
                    llm.collective_rpc("reload_weights", args=(given and str(given),))
                assert is_same(answer(llm), before)
        changes = {"use_cache": False, "eos_token_id": 3, "attention_dropout": 0.5, "mine": 1}
        changes["architectures"] = ["FSDPGemma2ForCausalLM"]
        (second / "config.json").write_text(json.dumps(config | changes))
        llm.update_weights(second)
        assert is_same(answer(llm), fresh)


def test_codes_of_another_meaning_are_refused(tmp_path: Path) -> None:
    """gptq_v2 has the same tensors as gptq, and zeros that are larger by one."""
    first, second = (
        quantise_checkpoint(
            make_checkpoint(tmp_path / str(seed) / "float", "llama", seed=seed), FORMATS["gptq"]
        ).stored
        for seed in (0, 77)
    )
    with engine(second) as llm:
        fresh = answer(llm)
    with engine(first) as llm:
        before = answer(llm)
        config = json.loads((second / "config.json").read_text())
        for version in ("gptq_v2", "gptq"):
            stored = config["quantization_config"] | {"checkpoint_format": version}
            changed = json.dumps(config | {"quantization_config": stored})
            (second / "config.json").write_text(changed)
            if version == "gptq_v2":
                with pytest.raises(ValueError, match="means something else by the quantization_co"):
                    llm.update_weights(second)
                assert is_same(answer(llm), before)
        llm.update_weights(second)
        assert is_same(answer(llm), fresh)


def test_the_checkpoint_of_the_start_may_be_gone(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = checkpoint("llama"), other("llama")
    with engine(first) as llm:
        before = answer(llm)
    with engine(shutil.copytree(second, tmp_path / "second")) as llm:
        after = answer(llm)
        shutil.rmtree(tmp_path / "second")
        llm.update_weights(first)
        assert is_same(answer(llm), before)
        llm.update_weights(weights_in(second))
        assert is_same(answer(llm), after)


def test_names_are_compared_by_what_they_stand_for(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names without a base, a tied head left out or added, a tower that the model does not read."""
    second = weights_in(other("llama"))
    bare = {name.removeprefix("model."): tensor for name, tensor in second.items()}
    with engine(other("llama")) as llm:
        fresh = answer(llm)
    with engine(checkpoint("llama")) as llm:
        before = answer(llm)
        name = "layers.1.mlp.down_proj.weight"
        with pytest.raises(ValueError, match=rf"'{name}' has the shape"):
            llm.update_weights({name: bare[name][:-1]})
        with pytest.raises(ValueError, match="are the same weight of the model"):
            llm.update_weights({name: bare[name], f"model.{name}": bare[name]})
        assert is_same(answer(llm), before)
        llm.update_weights(bare)
        assert is_same(answer(llm), fresh)
    tied = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    stated = weights_in(tied)
    assert "lm_head.weight" not in stated
    twice = shutil.copytree(tied, tmp_path / "twice")
    head = {"lm_head.weight": stated["model.embed_tokens.weight"].clone()}
    save_file({**stated, **head}, twice / "model.safetensors")
    for first, second_folder in ((tied, twice), (twice, tied)):
        with engine(first) as llm:
            before = answer(llm)
            llm.update_weights(second_folder)
            assert is_same(answer(llm), before)
    family = "qwen3_5_vl"
    with engine(other(family)) as llm:
        fresh = answer(llm)
    text = shutil.copytree(other(family), tmp_path / "text")
    tensors = weights_in(other(family))
    kept = {name: one for name, one in tensors.items() if "visual" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, text / "model.safetensors")
    with engine(checkpoint(family)) as llm:
        llm.update_weights(text)
        assert is_same(answer(llm), fresh)


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "granite_moe_shared", at_night("granite_moe_hybrid"), at_night("minimax")),
        *("minimax_m2", "kimi_linear", "bailing_hybrid", at_night("ernie4_5_moe")),
    ],
)
def test_names_of_transformers_modules(
    family: str, checkpoint: Checkpoint, other: Callable[[str], Path]
) -> None:
    """A trainer sends what its model has, where checkpoints have other names."""
    stored, model = weights_in(other(family)), load_reference(other(family))
    sent = {name: one for name, one in model.state_dict().items() if "decay" not in name}
    assert not sent.keys() <= stored.keys()
    if any(name.endswith("self_attn.conv1d.weight") for name in sent):  # of q, k and v
        parts = {name: one for name, one in stored.items() if "conv1d" in name}
        sent = {name: one for name, one in sent.items() if "conv1d" not in name} | parts
    with engine(other(family)) as llm:
        fresh = answer(llm)
    with engine(checkpoint(family)) as llm:
        assert not is_same(answer(llm), fresh)
        llm.update_weights(sent)
        assert is_same(answer(llm), fresh)


def load_in_turn(llm: LLM, *parts: dict[str, torch.Tensor]) -> None:
    with llm.weight_update() as load:
        for part in parts:
            load(part)


def test_after_a_failure_in_the_middle_requests_are_refused(
    checkpoint: Checkpoint,
    other: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until a whole checkpoint comes."""
    folder, weights = checkpoint("llama"), weights_in(other("llama"))
    name, nonsense = "model.norm.weight", {"model.layers.0.nonsense.weight": torch.ones(2)}

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    with engine(folder) as llm:
        before = answer(llm)
        with monkeypatch.context() as patch:
            patch.setattr(WeightUpdates, "_note_replaced", fail)
            with pytest.raises(OSError, match="disk"):
                llm.update_weights({name: weights[name]})
        with pytest.raises(ValueError, match=r"update of them ended: the disk is gone"):
            answer(llm)
        with pytest.raises(ValueError, match="whole checkpoint first"):
            llm.generate(PROMPTS, greedy(1), use_tqdm=False)
        llm.update_weights(folder)
        with pytest.raises(ValueError, match="nonsense"):
            load_in_turn(llm, {name: weights[name]}, nonsense)
        with pytest.raises(ValueError, match=r"its weights are mixed, .*nonsense"):
            answer(llm)
        # Tensors one after another are a whole checkpoint, too.
        load_in_turn(llm, *({one: tensor} for one, tensor in weights.items()))
        assert not is_same(answer(llm), before)
        part = tmp_path / "part"
        part.mkdir()
        half = dict(list(weights.items())[::2])
        save_file(half, part / "model.safetensors")
        with pytest.raises(ValueError, match="is missing, and"):
            llm.update_weights(part)
        llm.collective_rpc("reload_weights")
        assert is_same(answer(llm), before)
        with pytest.raises(ValueError, match="nonsense"):
            load_in_turn(llm, weights, nonsense)  # all of them came before it
        assert not is_same(answer(llm), before)


@pytest.mark.parametrize("tied", [False, at_night(True)])
def test_what_fails_while_it_loads_changes_nothing(
    tied: bool, checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    config = {"tie_word_embeddings": tied}
    weights = weights_in(checkpoint("llama", seed=77, **config))
    last = "model.layers.3.mlp.down_proj.weight"
    nonsense = {**weights, "model.layers.0.nonsense.weight": torch.ones(2)}
    if tied:  # a head of its own, which comes too late to be refused
        nonsense["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    folder = tmp_path / "nonsense"
    shutil.copytree(checkpoint("llama", **config), folder)
    with engine(checkpoint("llama", **config)) as llm:
        before = answer(llm)
        for changed in (nonsense, {**weights, last: weights[last].long()}):
            save_file(changed, folder / "model.safetensors")
            for bad in (folder, changed):
                with pytest.raises(ValueError, match=r"nonsense|torch\.int64"):
                    llm.update_weights(bad)
                assert is_same(answer(llm), before)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", {}),
        at_night("gpt2", {}),
        at_night("gemma3_vl", {}),
        at_night("llama", {"tensor_parallel_size": 2}),
        at_night("llama", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_head_that_an_update_unties_can_be_tied_again(
    family: str, ranks: dict[str, int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """By a checkpoint, by tensors, and by tensors that come one by one in any order."""
    tie = partial(checkpoint, family, tie_word_embeddings=True)
    first, second, untied = tie(), tie(seed=77), tmp_path / "untied"
    weights = weights_in(second)
    (table,) = (one for one in weights if one.endswith(("embed_tokens.weight", "wte.weight")))
    base = "language_model." if table.startswith("language_model.") else ""
    head = {f"{base}lm_head.weight": weights[table] * 0.5 + 0.1}
    shutil.copytree(second, untied)
    save_file({**weights, **head}, untied / "model.safetensors", {"format": "pt"})
    fresh = []
    for folder in (first, second, untied):
        with engine(folder, **ranks) as llm:
            fresh.append(answer(llm))
    one_by_one = [{name: one} for name, one in weights.items()]
    with engine(first, **ranks) as llm:
        for update, right in (
            (untied, 2),
            (first, 0),
            ({**weights, **head}, 2),
            (weights, 1),
            ([head, *one_by_one], 2),
            (one_by_one, 1),
            ([*one_by_one, head], 2),
            ([*one_by_one, dict.fromkeys(head, weights[table])], 1),
        ):
            if isinstance(update, list):
                load_in_turn(llm, *update)
            else:
                llm.update_weights(update)
            assert is_same(answer(llm), fresh[right])


def test_copies_of_shared_blocks_are_skipped_while_the_head_is_untied(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Zamba's config ties the blocks and the head by one entry, and the head may differ."""
    folder, untied = checkpoint("zamba2", tie_word_embeddings=True), tmp_path / "untied"
    weights = weights_in(folder)
    config = json.loads((folder / "config.json").read_text())
    kinds, num_blocks = config["layers_block_type"], config["num_mem_blocks"]
    uses = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    copies = {
        name.replace(f"layers.{uses[number % num_blocks]}.", f"layers.{use}."): tensor.clone()
        for number, use in enumerate(uses[num_blocks:])
        for name, tensor in weights.items()
        if name.startswith(f"model.layers.{uses[number % num_blocks]}.shared_transformer.")
        and "adapter" not in name
    }
    assert copies
    head = {"lm_head.weight": weights["model.embed_tokens.weight"] * 0.5 + 0.1}
    shutil.copytree(folder, untied)
    save_file({**weights, **copies, **head}, untied / "model.safetensors", {"format": "pt"})
    with engine(untied) as llm:
        fresh = answer(llm)
    with engine(folder) as llm:
        before = answer(llm)
        for update, right in ((untied, fresh), (untied, fresh), (folder, before), (untied, fresh)):
            llm.update_weights(update)
            assert is_same(answer(llm), right)


def module_of(name: str) -> str:
    """The module of a tensor of codes, or the tensor itself."""
    return f"{name.partition('_proj.')[0]}_proj" if "_proj." in name else name


IN_ORDER = [name for name in FORMATS if name not in ("gptq-3", "gptq-order", "int4-order")]
"""Formats whose inputs ranks can share."""
STORED = [
    ("fp8-block", 1),
    *(at_night(name, 1) for name in FORMATS if name != "fp8-block"),
    *(at_night(name, 2) for name in IN_ORDER),
]


@pytest.mark.parametrize(("stored", "ranks"), STORED)
def test_codes_of_a_quantised_checkpoint(stored: str, ranks: int, tmp_path: Path) -> None:
    """From a folder and from memory; what does not fit changes nothing."""
    sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    plain = [
        make_checkpoint(tmp_path / f"{seed}" / "plain", "llama", seed=seed, **sizes)
        for seed in (3, 4)
    ]
    first, second = (quantise_checkpoint(folder, FORMATS[stored]) for folder in plain)
    weights = weights_in(second.stored)
    part = [name for name in weights if "layers.2.mlp.down_proj" in name and "input" not in name]
    floats = (name for name in part if weights[name].is_floating_point() and "map" not in name)
    scale = next(floats, part[0])
    if stored.startswith("fp8"):
        scale = next(name for name in part if "scale" in name)
    bad: list[tuple[Any, str]] = [
        ({one: x for one, x in weights.items() if one != scale}, "down_proj"),
        ({part[0]: weights[part[0]]}, "belong together"),
        (weights_in(second.dequantised), "kept as|the model's is"),
        (second.dequantised, "is missing|the model's is"),
        ({**weights, part[0]: weights[part[0]].to("meta")}, "on meta"),
    ]
    if weights[scale].dtype in LOADABLE_DTYPES:
        bad.append(({**weights, scale: weights[scale] * torch.nan}, "finite"))
    options = {"tensor_parallel_size": ranks}
    with engine(second.stored, **options) as llm:
        fresh = answer(llm)
    with engine(first.stored, **options) as llm:
        before = answer(llm)
        for given, message in bad:
            with pytest.raises(ValueError, match=message):
                llm.update_weights(given)
            assert is_same(answer(llm), before)
        for given in (second.stored, weights):
            llm.update_weights(given)
            assert is_same(answer(llm), fresh) and not is_same(before, fresh)
            llm.update_weights(first.stored)
        with llm.weight_update() as load:
            for module in dict.fromkeys(map(module_of, weights)):
                load({one: x for one, x in weights.items() if module_of(one) == module})
        assert is_same(answer(llm), fresh)


def test_modules_of_transformers_and_shared_prefixes_refuse(
    checkpoint: Checkpoint, other: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    with engine(folder, model_impl="transformers") as llm:
        before = answer(llm)
        for weights in (other("llama"), weights_in(other("llama"))):
            with pytest.raises(ValueError, match="transformers loaded them"):
                llm.update_weights(weights)
        assert is_same(answer(llm), before)
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with (
        engine(folder, kv_transfer_config=transfer) as llm,
        pytest.raises(ValueError, match="shares what they compute"),
    ):
        llm.update_weights(other("llama"))


def test_calls_of_the_worker(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), worker_extension_cls=EXTENSION) as llm:
        assert llm.collective_rpc("add", args=(2,), kwargs={"b": 5}) == [7]
        assert llm.collective_rpc(device_of) == ["cpu"]
        assert llm.apply_model(count_parameters)[0] > 10_000
        with pytest.raises(ValueError, match="no method 'subtract'"):
            llm.collective_rpc("subtract")
    for name, message in (
        (EXTENSION.replace("Extension", "Taken"), "workers have load_model already"),
        (EXTENSION + "s", "cannot be imported"),
        ("tests.engine.worker_extension.device_of", "is not a class"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(str(checkpoint("llama")), worker_extension_cls=name)


def test_calls_of_the_worker_that_change_states(
    checkpoint: Checkpoint, other: Callable[[str], Path]
) -> None:
    """Requests under way are completed first, and prefixes are forgotten."""
    first, second = checkpoint("llama"), other("llama")
    with engine(first) as llm:

        def last_rows() -> list[HiddenStatesSample]:
            return list(llm.extract(PROMPTS, [3], positions="last"))

        of_first, text = last_rows(), list(llm.extract(PROMPTS, [3], sampling_params=greedy(20)))
        llm.update_weights(second)
        of_second = last_rows()
        llm.collective_rpc("reload_weights")
        assert is_same(last_rows(), of_first)
        samples = llm.extract(PROMPTS, [3], sampling_params=greedy(20))
        found = [next(samples)]
        llm.collective_rpc("update_weights", args=(weights_in(second),))
        assert is_same([*found, *samples], text)
        assert is_same(last_rows(), of_second)
        llm.collective_rpc("sleep")
        llm.collective_rpc("wake_up")
        assert is_same(last_rows(), of_second)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(level: int, checkpoint: Checkpoint) -> None:
    """Memory is freed; what follows has the same bits."""
    folder = checkpoint("qwen3_5")
    with LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=2**28) as llm:
        worker = core_of(llm).executor.worker
        worker.model_runner.pool.fill_(-1)
        before = answer(llm)
        used = psutil.Process().memory_info().rss
        llm.sleep(level)
        assert psutil.Process().memory_info().rss < used - 2**27
        assert llm.collective_rpc("is_sleeping") == [True]
        with pytest.raises(ValueError, match="sleeps: wake_up"):
            answer(llm)
        with pytest.raises(ValueError, match="sleeps already"):
            llm.sleep()
        if level == 2:
            with pytest.raises(ValueError, match="wake_up"):
                llm.update_weights(folder)
            parameters = worker.model_runner.model.parameters()
            assert all(p.untyped_storage().nbytes() == 0 for p in parameters)
        llm.wake_up(["kv_cache"])
        llm.wake_up()
        worker.model_runner.pool.fill_(-1)
        if level == 2:
            with pytest.raises(ValueError, match="discarded by sleep"):
                answer(llm)
            llm.update_weights(folder)
        assert is_same(answer(llm), before)
        with pytest.raises(ValueError, match="level=3"):
            llm.sleep(3)
        with pytest.raises(ValueError, match="tags"):
            llm.wake_up(["cache"])


def test_a_table_that_was_rounded_with_its_head_is_not_untied(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    weights = weights_in(checkpoint("llama", tie_word_embeddings=True, seed=77))
    table = weights["model.embed_tokens.weight"]
    with engine(folder, head_quantization="int8") as llm:
        before = answer(llm)
        for head in (weights | {"lm_head.weight": table + 1}, {"lm_head.weight": table}):
            with pytest.raises(ValueError, match="head_quantization rounded both"):
                llm.update_weights(head)
            assert is_same(answer(llm), before)
        llm.update_weights(weights | {"lm_head.weight": table.clone()})
        llm.update_weights({"lm_head.weight": table})
        assert not is_same(answer(llm), before)


@pytest.mark.parametrize("method", ["int4", at_night("fp8"), at_night("int8")])
def test_codes_can_be_loaded_after_a_sleep_that_discards_them(
    method: str, checkpoint: Checkpoint, other: Callable[[str], Path]
) -> None:
    with engine(other("llama"), quantization=method) as llm:
        fresh = answer(llm)
    with engine(checkpoint("llama"), quantization=method) as llm:
        for update in (other("llama"), weights_in(other("llama"))):
            llm.sleep(2)
            llm.wake_up()
            llm.update_weights(update)
            assert is_same(answer(llm), fresh)


def test_sleep_beside_a_connector_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with (
        engine(checkpoint("llama"), **extraction_config([2], tmp_path)) as llm,
        pytest.raises(ValueError, match="KV connector"),
    ):
        llm.sleep()


def watch_commands(llm: AsyncLLM) -> list[type]:
    """The kinds of commands that the core gets from now on."""
    client: Any = llm._client
    send, sent = client.send, []

    async def watched(command: Any) -> None:
        sent.append(type(command))
        await send(command)

    client.send = watched
    return sent


def test_in_another_process(checkpoint: Checkpoint, other: Callable[[str], Path]) -> None:
    """Requests run while weights come; calls, refusals, aborts, sleep."""
    first, second = checkpoint("llama"), other("llama")
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    expected = []
    for folder in (first, second):
        with engine(folder) as llm:
            expected.append(list(llm.extract(PROMPTS, [3])))

    async def extract(llm: AsyncLLM) -> list[HiddenStatesSample]:
        return [sample async for sample in llm.extract(PROMPTS, [3])]  # type: ignore[misc]

    async def run() -> None:
        args = AsyncEngineArgs(str(first), worker_extension_cls=EXTENSION, **options)
        llm = AsyncLLM.from_engine_args(args)
        try:
            assert is_same(await extract(llm), expected[0])
            under_way = [asyncio.create_task(extract(llm)) for _ in range(4)]
            await asyncio.sleep(0)
            await llm.update_weights(second)
            assert is_same(await extract(llm), expected[1])
            for samples in await asyncio.gather(*under_way):
                assert any(is_same(samples[:1], one[:1]) for one in expected)
            await llm.update_weights(weights_in(first))
            assert is_same(await extract(llm), expected[0])
            async with llm.weight_update() as load:
                waiting = asyncio.create_task(extract(llm))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                for name, tensor in weights_in(second).items():
                    await load({name: tensor})
            assert is_same(await waiting, expected[1])
            async with llm.paused():
                waiting = asyncio.create_task(extract(llm))
                await asyncio.sleep(0.05)
            async with llm.weight_update() as load:  # begins before the waiting task goes on
                await load(dict(list(weights_in(first).items())[::2]))
                await asyncio.sleep(0.05)
                await load(weights_in(first))
            assert is_same(await waiting, expected[0])
            long = asyncio.create_task(generate(llm))
            await asyncio.sleep(0.1)
            sent = watch_commands(llm)
            await llm.update_weights(first, mode="abort")
            assert sent == [AbortRequests, CallWorkers, CallWorkers, ResetPrefixCache]
            assert await long == "abort"
            assert is_same(await extract(llm), expected[0])
            with pytest.raises(ValueError, match="shape"):
                await llm.update_weights({"model.norm.weight": torch.ones(3)})
            with pytest.raises(ValueError, match="mode='never'"):
                await llm.update_weights(first, mode="never")  # type: ignore[arg-type]
            assert is_same(await extract(llm), expected[0])
            assert await llm.collective_rpc("add", args=(1,)) == [2]
            assert await llm.apply_model(count_parameters) != [0]
            with pytest.raises(RuntimeError, match="KeyError: 'on purpose'"):
                await llm.collective_rpc("fail", args=("other",))
            with pytest.raises(ValueError, match="cannot be sent to the engine's process"):
                await llm.collective_rpc(lambda worker: worker)
            with pytest.raises(ValueError, match="on purpose"):
                await llm.collective_rpc("fail", args=("value",))
            await llm.update_weights(second)
            long = asyncio.create_task(generate(llm))
            await asyncio.sleep(0.1)
            sent = watch_commands(llm)
            with pytest.raises(TimeoutError):
                await llm.collective_rpc("reload_weights", 1e-3)
            assert not sent and not await llm.is_paused() and not long.done()
            await llm.collective_rpc("reload_weights")
            assert long.done() and sent == [CallWorkers, CallWorkers, ResetPrefixCache]
            assert is_same(await extract(llm), expected[0])
            await llm.sleep(2)
            assert await llm.is_sleeping()
            with pytest.raises(ValueError, match="sleeps"):
                await extract(llm)
            await llm.wake_up()
            await llm.update_weights(first)
            assert is_same(await extract(llm), expected[0])
        finally:
            await llm.shutdown()

    async def generate(llm: AsyncLLM) -> str | None:
        reason = None
        async for output in llm.generate(PROMPTS[0], greedy(400), "long"):
            reason = output.outputs[0].finish_reason
        return reason

    asyncio.run(run())
