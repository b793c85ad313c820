"""Classes that serve each architecture, also in processes that are started later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from vllm.model_classes import _ModelRegistry
from vllm.model_executor.models import is_hybrid, supports_eagle3, supports_row_capture
from vllm.model_executor.models.registry import ModelRegistry


class OutOfTree(nn.Module):
    """A class that can be imported by name."""


HYBRIDS = ("BailingHybrid", "Bamba", "FalconH1", "GraniteMoeHybrid", "Jamba", "KimiLinear")
HYBRIDS += ("Lfm2", "MiniMaxForCausalLM", "NemotronH", "OlmoHybrid", "Qwen3_5", "Qwen3Next")
HYBRIDS += ("Recurrent", "Zamba")
"""Beginnings of the names of architectures that have recurrent layers and attention."""


@pytest.fixture
def registry() -> _ModelRegistry:
    return _ModelRegistry({"BuiltIn": f"{__name__}:OutOfTree"})


def test_built_in_architectures_resolve() -> None:
    for arch in ModelRegistry.get_supported_archs():
        model_class, found = ModelRegistry.resolve_model_cls([arch])
        assert (model_class.__name__, found) == (arch, arch)
        assert supports_row_capture(model_class)
        assert not supports_eagle3(model_class)
        assert is_hybrid(model_class) == arch.startswith(HYBRIDS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("LlamaForSequenceClassification", ["LlamaForCausalLM", "Llama4ForCausalLM"]),
        ("Qwen3Model", ["Qwen3ForCausalLM"]),
        ("GPT9LMHeadModel", ["GPT2LMHeadModel"]),
        ("Minstral3ForCausalLM", ["Ministral3ForCausalLM"]),
    ],
)
def test_an_unsupported_architecture_is_told_the_nearest(name: str, nearest: list[str]) -> None:
    with pytest.raises(ValueError, match="not supported; the nearest") as caught:
        ModelRegistry.resolve_model_cls([name])
    named = str(caught.value).partition("that are: ")[2].partition(";")[0].split(", ")
    assert len(named) == 5
    assert named[: len(nearest)] == nearest
    assert set(named) <= set(ModelRegistry.get_supported_archs())
    assert "`vllm models` lists all" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_first_supported_architecture_counts(registry: _ModelRegistry) -> None:
    assert registry.resolve_model_cls(["FancyLM", "BuiltIn"]) == (OutOfTree, "BuiltIn")


def test_a_registered_class_reaches_another_process(registry: _ModelRegistry) -> None:
    registry.register_model("ByClass", OutOfTree)
    registry.register_model("ByName", f"{__name__}:OutOfTree")
    worker = _ModelRegistry({})
    worker.restore(registry.snapshot())
    assert worker.get_supported_archs() == ["ByClass", "ByName"]
    assert worker.resolve_model_cls("ByClass") == (OutOfTree, "ByClass")


def test_a_class_without_an_importable_name_says_how_to_register(
    registry: _ModelRegistry,
) -> None:
    class Local(nn.Module):
        pass

    registry.register_model("Local", Local)
    assert registry.resolve_model_cls("Local")[0] is Local
    with pytest.raises(ValueError, match=r"Local.*vllm\.general_plugins"):
        registry.snapshot()


def test_a_module_that_a_worker_lacks_says_how_to_register(registry: _ModelRegistry) -> None:
    registry.register_model("Elsewhere", "module_of_another_machine:Model")
    with pytest.raises(ValueError, match=r"module_of_another_machine.*vllm\.general_plugins"):
        registry.resolve_model_cls("Elsewhere")


@pytest.mark.parametrize("target", ["no_colon", "a:b:c", int, 5])
def test_what_is_no_model_class_is_refused(registry: _ModelRegistry, target: object) -> None:
    with pytest.raises(ValueError, match="'module:Class'"):
        registry.register_model("Bad", target)  # type: ignore[arg-type]


def test_registering_by_name_imports_nothing(
    registry: _ModelRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_model.py").write_text("from torch import nn\nclass M(nn.Module): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.register_model("Lazy", "lazy_model:M")
    assert "lazy_model" not in sys.modules
    assert registry.resolve_model_cls("Lazy")[0].__name__ == "M"
