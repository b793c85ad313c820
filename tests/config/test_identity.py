"""Identity of what values depend on: whatever changes a bit changes it, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import make_checkpoint
from vllm import plugins
from vllm.config import code_identity, identity
from vllm.config.identity import value_identity
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.resolve import Resolved
from vllm.model_classes import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.training import ExtractingDataset
from vllm.utils import weight_files
from vllm.utils.weight_files import digest_of_content


class Changed(LlamaForCausalLM):
    """A class from elsewhere."""

    def method(self) -> float:
        """Replaced below."""
        return 1.0


def of(folder: Path, **options: Any) -> dict[str, Any]:
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    return value_identity(config, "kernels")


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_where_and_when_files_lie_does_not_matter(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    os.utime(moved / "model.safetensors", (1, 1))
    assert of(moved, max_model_len=64, seed=3, max_num_batched_tokens=37) == before


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    os.utime(path, (1, 1))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("is_large", [False, True])
def test_other_weights_of_the_same_size_and_time(
    is_large: bool, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor counts, however short, wherever it lies. Of large files only samples are read."""
    if is_large:
        monkeypatch.setattr(weight_files, "_MOST_WHOLE_BYTES", 0)
    tensors = load_file(folder / "model.safetensors")
    tensors = {"before": torch.randn(1 << 20), **tensors, "zz_behind": torch.randn(1 << 20)}
    (folder / "model.safetensors").unlink()
    path = folder / name
    _write(tensors, path)
    files, before = [path], of(folder)
    norms = [one for one in tensors if "norm" in one]
    for changed in (*norms, next(one for one in tensors if "v_proj" in one)):
        _write({**tensors, changed: tensors[changed] * 1.5}, path)
        content = digest_of_content(files)
        assert content != before["weights_content"], changed
        last = tensors[changed].clone()
        last.view(-1)[-1] += 1
        _write({**tensors, changed: last}, path)
        assert digest_of_content(files) not in (content, before["weights_content"]), changed
    _write(tensors, path)
    assert of(folder) == before


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"model_impl": "transformers"},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": lambda config: config.update({"rms_norm_eps": 1e-3}) or config},
        {"load_format": "dummy"},
        {"model_class_overrides": {"LlamaForCausalLM": f"{__name__}:Changed"}},
    ],
)
def test_what_changes_values(options: dict[str, Any], folder: Path) -> None:
    assert of(folder, **options) != of(folder)
    assert of(folder, **options) == of(folder, **options)


def test_the_seed_of_dummy_weights(folder: Path) -> None:
    first, second = (of(folder, load_format="dummy", seed=seed) for seed in (1, 2))
    assert first != second


def test_a_registered_class_and_its_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of(folder)
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    for code in ("", "    x = 1\n"):
        module = tmp_path / "own_model.py"
        module.write_text(f"from {__name__} import Changed\nclass Own(Changed):\n    y = 1\n{code}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "own_model", raising=False)
        ModelRegistry.register_model("LlamaForCausalLM", "own_model:Own")
        found = of(folder)
        assert found["model_classes"]["LlamaForCausalLM"]["class"] == "own_model:Own"
        assert found != before
        before = found


def test_code_that_a_registered_class_uses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of a module beside it, through another one."""
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": "user_model:User"})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_model.py").write_text(
        f"import user_layers\nfrom {__name__} import Changed\nclass User(Changed):\n    y = 1\n"
    )
    (tmp_path / "user_layers.py").write_text("from user_functions import scale\n")
    (tmp_path / "unused.py").write_text("a = 1\n")
    found = []
    for file, code in (("functions", 1), ("functions", 2), ("unused", 1), ("functions", 1)):
        (tmp_path / f"user_{file}.py").write_text(f"def scale(x):\n    return {code} * x\n")
        for name in ("user_model", "user_layers", "user_functions"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        found.append(of(folder)["model_classes"]["LlamaForCausalLM"]["code"])
    assert found[1] == found[2] != found[0] == found[3]


IMPORTS = {
    "in a function": ("", "from user_part import factor"),
    "of a constant": ("from user_part import factor", ""),
    "of a module in a function": ("", "import user_part\n        factor = user_part.factor"),
}


@pytest.mark.parametrize("way", IMPORTS)
def test_code_that_a_registered_class_imports(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above, inside = IMPORTS[way]
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": "user_model:User"})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_model.py").write_text(
        f"{above}\nfrom {__name__} import Changed\nclass User(Changed):\n"
        f"    def compute_logits(self, hidden):\n        {inside}\n"
        "        return factor * super().compute_logits(hidden)\n"
    )
    found = []
    for factor in (1, 2, 1):
        (tmp_path / "user_part.py").write_text(f"factor = {factor}\n")
        for name in ("user_model", "user_part"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        found.append(of(folder))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    "changed", ["user_script.py", "user_space/part/__init__.py", "user_old.py"]
)
def test_code_that_is_imported_later_does_not_run_now(
    changed: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script, a part of a package without a file of its own, and what Python cannot read."""
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": "user_model:User"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    (tmp_path / "user_model.py").write_text(
        f"from {__name__} import Changed\nclass User(Changed):\n    def forward(self):\n"
        "        from user_script import a\n        from user_space.part import b\n"
        "        import user_old\n        import user_nowhere.x\n"
    )
    ran = tmp_path / "ran"
    (tmp_path / "user_space" / "part").mkdir(parents=True)
    for file in ("user_script.py", "user_space/part/__init__.py"):
        (tmp_path / file).write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit")
    (tmp_path / "user_old.py").write_text("print 1")
    before = of(folder)
    assert of(folder) == before
    with (tmp_path / changed).open("a") as file:
        file.write("\n# changed")
    assert of(folder) != before
    assert not ran.exists()


def _times(factor: float) -> Any:
    return lambda *_: factor


def _by_default(factor: float) -> Any:
    def scaled(*_: Any, factor: float = factor) -> float:
        return factor

    return scaled


def _wrapped(factor: float) -> Any:
    return functools.wraps(Changed.method)(_times(factor))


SET: dict[str, Callable[[float], Any]] = {
    "number": lambda x: x,
    "numbers": lambda x: [1, {"a": (2, x)}],
    "names": lambda x: {"a", str(x)},
    "tensor": lambda x: torch.tensor(x),
    "complex tensor": lambda x: torch.tensor([complex(1, x)]).conj(),
    "large number": lambda x: torch.tensor(2**53 + int(2 * x)),
    "class": lambda x: LlamaForCausalLM if x > 2 else transformers.LlamaModel,
    "function": lambda x: _times if x > 2 else _wrapped,
    "closure": _times,
    "default": _by_default,
    "wrapper": _wrapped,
    "partial": lambda x: functools.partialmethod(_times, x),
    "static": lambda x: staticmethod(_times(x)),
    "property": lambda x: property(_times(x)),
    "text": lambda x: eval(f"lambda *_: [{x} for _ in ()]"),
}


@pytest.mark.parametrize("kind", SET)
@pytest.mark.parametrize("name", ["method", "added"])
def test_what_is_set_on_a_registered_class(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is, as it would be in another process: made anew."""
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": Changed})
    found = [of(folder)]
    for factor in (1.5, 2.5, 1.5):
        with monkeypatch.context() as patch:
            patch.setattr(Changed, name, SET[kind](factor), raising=False)
            found.append(of(folder))
    assert found[1] == found[3]
    assert found[0] != found[1] != found[2] != found[0]


def test_a_class_of_another_package_counts_by_its_own_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All files of transformers would take half a minute to find."""
    counted: list[set[Path]] = []
    monkeypatch.setattr(code_identity, "digest_of_files", lambda files, _: counted.append(files))
    monkeypatch.setattr(Changed, "added", transformers.LlamaModel, raising=False)
    code_identity.code_of(Changed)
    (files,) = counted
    own = Path(str(sys.modules[transformers.LlamaModel.__module__].__file__))
    assert own in files and sum("transformers" in file.parts for file in files) < 20


class OwnConfig(transformers.LlamaConfig):  # type: ignore[misc]
    """A config that transformers is told of."""

    model_type = "own_llama"


class OwnModel(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Its model."""

    config_class = OwnConfig
    factor = 1


def test_a_model_that_is_registered_in_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.AutoConfig.register("own_llama", OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    named = {**config, "model_type": "own_llama", "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(named))
    before = of(folder)
    assert of(folder) == before
    monkeypatch.setattr(OwnModel, "factor", 2)
    assert of(folder) != before


def test_torchs_switch_for_float32_products(folder: Path) -> None:
    before = of(folder)
    try:
        torch.set_float32_matmul_precision("medium")
        assert of(folder) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert of(folder) == before


def test_a_class_without_a_file_is_never_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = type("Made", (Changed,), {"__module__": "__interactive__"})
    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": made})
    assert of(folder) != of(folder)


def test_a_module_of_transformers_that_runs_instead_of_a_class(tmp_path: Path) -> None:
    """Its release matters, as soon as it is known that it runs."""
    folder = make_checkpoint(tmp_path / "model", "llama", hidden_act="quick_gelu")
    (records := tmp_path / "records.jsonl").write_text('{"input_ids": [5, 6]}\n')
    options = ExtractOptions(input=(str(records),), layers="1", output=str(tmp_path / "out"))
    resolved = Resolved(options, EngineArgs(model=str(folder)))
    assert "transformers" not in value_identity(resolved.vllm_config, "kernels")
    resolved.check_model()
    found = value_identity(resolved.vllm_config, "kernels")
    assert found["transformers"] == transformers.__version__
    dataset = ExtractingDataset(str(folder), [[5, 6]], [1], cache=str(tmp_path / "cache"))
    assert dataset._runs_as_module()


def test_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(folder)
    plugin = EntryPoint("own", f"{__name__}:of", plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(identity, "loaded_plugins", [plugin])
    (stated,) = of(folder)["plugins"]
    assert stated["name"] == "own" and stated["code"]
    assert of(folder) != before


def test_the_code_of_a_plugin(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modules of a package count, also one that a function imports."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "alone.py").write_text("def register():\n    pass\n")
    package = tmp_path / "extension"
    (package / "layers").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    lines = "def register():\n    from extension.layers.patches import apply\n    apply()\n"
    (package / "entry.py").write_text(lines)
    found = []
    for number in (1, 2, 1):
        patches = f"VALUE = {number}\ndef apply():\n    pass\n"
        (package / "layers" / "patches.py").write_text(patches)
        for value in ("extension.entry:register", "alone:register"):
            plugin = EntryPoint("own", value, plugins.GENERAL_PLUGINS_GROUP)
            plugin.load()()
            monkeypatch.setattr(identity, "loaded_plugins", [plugin])
            (stated,) = of(folder)["plugins"]
            found.append(stated["code"])
    assert found[0] == found[4] != found[2]
    assert len({found[0], *found[1::2]}) == 2


def test_code_that_comes_with_the_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for code in ("a = 1", "a = 2"):
        (folder / "modeling_own.py").write_text(code)
        found.append((of(folder), of(folder, trust_remote_code=True)))
    assert found[0][0] == found[1][0]  # it does not run
    assert found[0][1]["remote_code"] != found[1][1]["remote_code"]


def test_code_that_lies_in_another_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "code"
    other.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": f"{other}--modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    (other / "modeling_own.py").write_text("from .helper import a")
    found = []
    for code in ("a = 1", "a = 2"):
        (other / "helper.py").write_text(code)
        found.append(of(folder, trust_remote_code=True)["remote_code"])
    assert found[0] != found[1]


def test_an_index_tells_which_file_a_tensor_is_read_from(folder: Path) -> None:
    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, factor in zip(names, (1.0, 1.5), strict=True):
        save_file({key: value * factor for key, value in tensors.items()}, folder / name)
    found = []
    for name in names:
        places = dict.fromkeys(tensors, names[0]) | {"model.norm.weight": name}
        index = {"metadata": {}, "weight_map": places | {"model.embed_tokens.weight": names[1]}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found.append(of(folder))
    assert found[0] != found[1]


def test_files_that_are_not_read_do_not_matter(folder: Path) -> None:
    """``load_format`` decides which ones are read."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    before = of(folder), of(folder, load_format="pt")
    for name in ("adapter_model", "consolidated.00", "other"):
        save_file({"x": torch.ones(3)}, folder / f"{name}.safetensors")
    assert (of(folder), of(folder, load_format="pt")) == before
    torch.save({"model.norm.weight": torch.ones(64)}, folder / "pytorch_model.bin")
    assert of(folder) == before[0]
    assert of(folder, load_format="pt") != before[1]


def test_quantisation_settings_beside_the_config(folder: Path) -> None:
    before = of(folder)
    settings = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    assert of(folder) != before


def test_a_hub_id_is_identified_by_its_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch moves, with and without its name as the revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--me--tiny"
    (cache / "refs").mkdir(parents=True)
    found = []
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(folder, cache / "snapshots" / commit)
        (cache / "refs" / "main").write_text(commit)
        found += [of(Path("me/tiny")), of(Path("me/tiny"), revision="main")]
        assert found[-1]["hub_commit"] == found[-2]["hub_commit"] == commit
    assert of(Path("me/tiny"), revision="a" * 40) == found[0]


def test_ends_of_generated_texts(folder: Path, tmp_path: Path) -> None:
    """generation_config.json may name more of them than the config does."""
    (records := tmp_path / "records.jsonl").write_text('{"input_ids": [5, 6]}\n')
    options = ExtractOptions(
        input=(str(records),), layers="1", output=str(tmp_path / "out"), generate=True
    )
    found = []
    for ends in ([258], [258, 5]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        found.append(Resolved(options, EngineArgs(model=str(folder))).settings("input"))
    assert any("eos_token_ids" in line for line in found[0].differences(found[1]))
    older = dataclasses.replace(found[0], options=dict(found[0].options))
    del older.options["sampling.eos_token_ids"]
    assert not older.differences(found[1])
