"""Checkpoints in ``pytorch_model.bin``: the same values, and errors that name the file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import engine, greedy, random_prompts
from tests.models import zoo
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from tests.models.test_loading import last_stream
from vllm.config import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import checkpoint, get_model
from vllm.model_executor.model_loader.adapter_files import read_adapter
from vllm.model_report.checkpoint_report import report_checkpoint
from vllm.transformers_utils.config import stored_dtype
from vllm.utils.torch_archive import read_saved
from vllm.utils.weight_files import digest_of_ends, find_weight_files, read_torch_file

Tensors = dict[str, torch.Tensor]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def read(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Any, form: str = "mapped") -> None:
    """As ``pytorch_model.bin``, in place of safetensors."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if form == "shards":
        names = list(tensors)
        parts = [names[0::3], names[1::3], names[2::3]]
        files = {f"pytorch_model-0000{i + 1}-of-00003.bin": part for i, part in enumerate(parts)}
        for file, part in files.items():
            torch.save({name: tensors[name] for name in part}, folder / file)
        where = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {}, "weight_map": where}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return
    is_archive = form == "mapped"
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    torch.save(print, folder / "training_args.bin")  # which nobody loads


@pytest.mark.parametrize("form", ["mapped", "shards", "before 1.6"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_values_are_those_of_safetensors(family: str, form: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False, tie_word_embeddings=True)
    expected = last_stream(folder)
    digest, tensors = digest_of_ends(find_weight_files(folder)), read(folder)
    embeddings = next(n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
    tensors["lm_head.weight"] = tensors[embeddings]  # one storage
    write(folder, tensors, form)
    assert torch.equal(last_stream(folder), expected)
    model = get_model(vllm_config=make_config(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert find_weight_files(folder)
    assert digest_of_ends(find_weight_files(folder)) != digest


@pytest.mark.parametrize("model_type", ["mpt", "gemma3_vl"])
def test_modules_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Modules of a whole checkpoint, and of the language part of one."""
    if model_type == "mpt":
        zoo.make_checkpoint(tmp_path, model_type)
    else:
        make_checkpoint(tmp_path, model_type, tokenizer=False)
    prompts = random_prompts(1, [20])
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "model_impl": "transformers"}
    outputs = []
    for _ in range(2):
        with engine(tmp_path, **options) as llm:
            outputs.append(llm.generate(prompts, greedy(5), use_tqdm=False)[0].outputs[0].token_ids)
        if len(outputs) == 1:
            write(tmp_path, read(tmp_path))
    assert outputs[0] == outputs[1]


def test_which_of_two_formats_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    names = {
        load_format: [file.name for file in find_weight_files(folder, load_format)]
        for load_format in ("auto", "safetensors", "pt")
    }
    safetensors = ["model.safetensors"]
    assert names == {"auto": safetensors, "safetensors": safetensors, "pt": ["pytorch_model.bin"]}
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors files.*pytorch_model\.bin.*'safetens"):
        find_weight_files(folder, "safetensors")


def test_a_value_head_beside_torch_files(tmp_path: Path) -> None:
    """As trainers of rewards write it; the dtype is that of the model's weights as well."""
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.float16, tokenizer=False)
    expected = last_stream(folder)
    write(folder, read(folder), "shards")
    save_file({"v_head.weight": torch.ones(64)}, folder / "a_value_head.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": None}))
    assert all(file.suffix == ".bin" for file in find_weight_files(folder))
    assert [file.suffix for file in find_weight_files(folder, "safetensors")] == [".safetensors"]
    assert stored_dtype(str(folder)) == torch.float16
    assert torch.equal(last_stream(folder), expected)


@pytest.mark.parametrize("stays", ["index and shards", "index", "shards"])
def test_the_single_file_wins_over_shards_of_an_earlier_time(stays: str, tmp_path: Path) -> None:
    """As for transformers: they were saved in the same folder before it."""
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    expected, tensors = last_stream(folder), read(folder)
    write(folder, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, "shards")
    write(folder, tensors)
    gone = {"index": "pytorch_model-*", "shards": "*.index.json"}.get(stays)
    for path in folder.glob(gone) if gone else ():
        path.unlink()
    assert [path.name for path in find_weight_files(folder)] == ["pytorch_model.bin"]
    assert torch.equal(last_stream(folder), expected)


def test_dtype_is_that_of_the_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "opt", dtype=torch.float16, tokenizer=False)
    write(folder, read(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": None}))
    assert stored_dtype(str(folder)) == torch.float16
    assert make_config(folder).model_config.dtype == torch.float16


def without(name: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


class Code:
    """Object that would run a command if it were unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/it_was_run_by_unpickling",)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without(K_PROJ), rf"missing 1 weight\(s\): {K_PROJ}"),
        (lambda t: {**t, K_PROJ: t[K_PROJ][1:]}, rf"'{K_PROJ}' has shape \(31, 72\) in the file"),
        (lambda t: {**t, "model.extra": t[K_PROJ]}, r"no place for: model\.extra"),
        (lambda t: {**t, "epoch": 3}, r"pytorch_model\.bin holds 'epoch': int"),
        (lambda t: list(t.values()), r"pytorch_model\.bin holds list, not tensors"),
        (lambda t: {**t, "code": Code()}, r"pytorch_model\.bin is not a file of tensors.*code"),
    ],
    ids=["missing", "shape", "surplus", "number", "list", "code"],
)
def test_what_is_wrong_is_named(change: Any, error: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    write(folder, change(read(folder)))
    with pytest.raises(ValueError, match=error):
        get_model(vllm_config=make_config(folder, dtype="float32"))
    assert not Path("/tmp/it_was_run_by_unpickling").exists()


@pytest.mark.parametrize("form", ["mapped", "before 1.6"])
@pytest.mark.parametrize("keep", [0, 3, 2000, -200])
def test_a_damaged_file_is_named(form: str, keep: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    write(folder, read(folder), form)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is no"):
        get_model(vllm_config=make_config(folder, dtype="float32"))


def test_files_of_a_hub_id_are_fetched_only_where_there_are_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(_: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    config = make_config(folder)
    config.model_config.model = "somebody/model"
    for _ in range(2):
        checkpoint.checkpoint_folder(config.model_config, LoadConfig())
        (folder / "model.safetensors").unlink(missing_ok=True)
    safetensors, torchs = ["*.safetensors", "*.json"], ["pytorch_model*", "*.json"]
    assert asked == [safetensors, safetensors, torchs]


def test_links_of_the_hubs_cache_that_have_lost_their_files(tmp_path: Path) -> None:
    """The other format, which may be older, does not take their place."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"older weights")
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(ValueError, match=r"model\.safetensors is a link to nothing"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
def test_the_report_reads_their_headers(model_impl: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gpt2", tokenizer=False)
    reports = []
    for _ in range(2):
        args = EngineArgs(model=str(folder), model_impl=model_impl)
        reports.append(report_checkpoint(args.create_engine_config()))
        if len(reports) == 1:
            write(folder, read(folder))
    assert reports[0] == reports[1]
    assert reports[0].stored_bytes
    write(folder, without("transformer.h.1.mlp.c_fc.weight")(read_bin(folder)))
    with pytest.raises(ValueError, match=r"missing 1 weight\(s\): transformer\.h\.1\.mlp\.c_fc"):
        report_checkpoint(args.create_engine_config())


def read_bin(folder: Path) -> Tensors:
    tensors: Tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return tensors


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def with_pickle(operations: bytes) -> bytes:
    """An archive with other content."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + operations)
        archive.writestr("archive/data/0", bytes(16))
    return content.getvalue()


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_and_view_is_read(protocol: int, is_archive: bool, tmp_path: Path) -> None:
    if not is_archive and protocol > 3:
        protocol = 3  # torch.load reads no others, either
    drawn = torch.randn(3, 5, 8)
    kinds = "float64 bfloat16 int64 int16 int8 bool complex64 float8_e4m3fn float8_e5m2 uint16"
    tensors = {kind: drawn.to(getattr(torch, kind)) for kind in kinds.split()}
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    views = {"tied": drawn, "tied too": drawn, "part": drawn[1:, ::2], "swapped": drawn.mT}
    tagged = torch.nn.Parameter(drawn.clone())
    tagged.tag = "text"  # type: ignore[attr-defined]
    tensors |= {**views, "none": drawn[:0], "number": drawn[0, 0, 0], "tagged": tagged}
    path = tmp_path / "pytorch_model.bin"
    for value in (tensors, module.state_dict()):
        options = {"_use_new_zipfile_serialization": is_archive, "pickle_protocol": protocol}
        path.write_bytes(saved(value, **options))
        found = read_torch_file(path)
        assert list(found) == list(value)
        for name, tensor in value.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
        shapes = read_torch_file(path, shapes_only=True)
        assert all(one.is_meta and one.shape == value[name].shape for name, one in shapes.items())
    path.write_bytes(saved(views, _use_new_zipfile_serialization=is_archive))
    found = read_torch_file(path)
    assert found["tied"].data_ptr() == found["tied too"].data_ptr()


_GROWING = b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x10\x85R."
_DEEP_NAME = b"}N" + b"\x85" * 100_000 + b"Ns."
_SHARED_NAME = b"}N\x85q\0" + b"h\0h\0\x86q\0" * 60 + b"Ns."
_BYTES = b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little") + b"."


@pytest.mark.parametrize("operations", [_GROWING, _DEEP_NAME, _SHARED_NAME, _BYTES, b"}K\5Ns."])
def test_small_files_that_explode(operations: bytes, tmp_path: Path) -> None:
    """As a checkpoint and as an adapter, which a server reads while it serves others."""
    data = with_pickle(operations)
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    with pytest.raises(ValueError, match=r"pytorch_model\.bin (is not a file of tensors|holds 5)"):
        read_torch_file(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model is damaged|tensor 5 is not a lora_A"):
        read_adapter(tmp_path, 8)


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_tensor_that_is_larger_than_its_file(is_archive: bool, tmp_path: Path) -> None:
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): torch.ones(1).expand(1 << 20, 1 << 20),
        name.format("B"): torch.ones(1).expand(1 << 20, 1 << 20),
    }
    (tmp_path / "adapter_model.bin").write_bytes(
        saved(tensors, _use_new_zipfile_serialization=is_archive)
    )
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    with pytest.raises(ValueError, match=r"damaged: .* saved with 1 values; save a contiguous"):
        read_adapter(tmp_path, 8)


def test_damage_in_memory_is_found_whatever_the_directory_says() -> None:
    """The values changed, and the directory has no size of what is packed."""
    data = bytearray(saved({"a": torch.arange(1.0, 9.0)}))
    place = data.index(torch.arange(1.0, 9.0).numpy().tobytes())
    data[place] ^= 1
    with pytest.raises(ValueError, match="data/0' in it is damaged"):
        read_saved(bytes(data))
    entry = data.rindex(b"archive/data/0") - 46  # in the directory
    data[entry + 20 : entry + 24] = bytes(4)
    with pytest.raises(ValueError, match="data/0' in it is damaged"):
        read_saved(bytes(data))
