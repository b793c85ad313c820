"""Importing the package is cheap, and its public names are where they should be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import vllm
from tests.models.checkpoints import make_checkpoint
from vllm import envs
from vllm.utils.build_info import version_line
from vllm.utils.lazy_modules import imported_later
from vllm.version import __version__

MOST_MODULES = 20


def modules_loaded_by(code: str) -> list[str]:
    """Modules that a fresh interpreter imports for ``code``, without the standard library's."""
    program = (
        f"import json, sys\nbefore = set(sys.modules)\n{code}\n"
        "loaded = {name for name in set(sys.modules) - before\n"
        "          if name.partition('.')[0] not in sys.stdlib_module_names}\n"
        "print(json.dumps(sorted(loaded)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


def assert_few_and_ours(modules: list[str]) -> None:
    assert {name.partition(".")[0] for name in modules} == {"vllm"}
    assert len(modules) < MOST_MODULES


def test_import_loads_nothing_heavy() -> None:
    assert_few_and_ours(modules_loaded_by("import vllm"))


def test_public_names() -> None:
    assert vllm.__version__ == __version__
    assert set(vllm._MODULE_OF) == set(vllm.__all__) - {"__version__"}
    for name, module in vllm._MODULE_OF.items():
        value = getattr(vllm, name)
        assert value is getattr(sys.modules[module], name)
    assert set(vllm.__all__) <= set(dir(vllm))


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'vllm' has no attribute 'Nonsense'"):
        _ = vllm.Nonsense


def test_command_line_is_light() -> None:
    version = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.strip() == version_line()
    code = (
        "import contextlib\nfrom vllm.entrypoints.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['--version'])"
    )
    assert_few_and_ours(modules_loaded_by(code))


# Environment variables


def test_every_variable_is_annotated_and_documented() -> None:
    assert set(get_type_hints(envs)) - {"VARIABLES"} == set(envs.VARIABLES)
    assert all(variable.doc for variable in envs.VARIABLES.values())


def test_variables_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_THREADS", raising=False)
    assert envs.VLLM_CPU_THREADS is None
    monkeypatch.setenv("VLLM_CPU_THREADS", "3")
    assert envs.VLLM_CPU_THREADS == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert envs.OMP_NUM_THREADS == 4
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert envs.VLLM_LOGGING_LEVEL == "DEBUG"
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert envs.VLLM_PLUGINS == ()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("VLLM_CPU_THREADS", "0", "VLLM_CPU_THREADS='0': use a whole number of at least 1"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "VLLM_LOGGING_LEVEL='LOUD': use one of DEBUG, INFO"),
        ("VLLM_KERNELS", "fast", "VLLM_KERNELS='fast': use one of auto, plain, native"),
    ],
)
def test_bad_variables_are_named(
    name: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        getattr(envs, name)


def test_reading_a_config_loads_no_compiler(tmp_path: Path) -> None:
    """Functions that transformers marks for it meanwhile are marked when they are called."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    code = (
        "from vllm.transformers_utils.config import load_hf_config\n"
        f"assert load_hf_config({str(tmp_path)!r}).vocab_size == 7"
    )
    modules = modules_loaded_by(code)
    assert "transformers.models.llama.configuration_llama" in modules
    assert not {"torch._dynamo", "triton", "sympy", "torch.distributed.tensor"} & set(modules)


def test_an_engine_starts_without_the_compiler(tmp_path: Path) -> None:
    """Importing it takes longer than everything else in the start of a small model."""
    make_checkpoint(tmp_path, "llama")
    code = (
        "from vllm import LLM\n"
        f"llm = LLM({str(tmp_path)!r}, kv_cache_memory_bytes=2**22)\n"
        "(sample,) = llm.extract([[1, 2, 3]], layers=[1])\n"
        "assert sample.hidden_states.shape[0] == 3"
    )
    modules = set(modules_loaded_by(code))
    assert "vllm.model_executor.models.llama" in modules
    assert not {"torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"} & modules
    assert not {"triton", "torch.distributed.tensor", "scipy", "pandas", "pyarrow"} & modules


def test_what_a_config_does_not_import_is_there_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    code = (
        "from vllm.transformers_utils.config import load_hf_config\n"
        f"config = load_hf_config({str(tmp_path)!r})\n"
        "import transformers.core_model_loading as loading, torch\n"
        "assert not isinstance(torch.ones(1), loading.DtensorShardOperation)\n"
        "assert loading.is_dtensor(torch.ones(1)) is False\n"
        "from transformers.distributed import utils\n"
        "assert utils.is_dtensor is loading.is_dtensor._find()\n"
        "from transformers.distributed.sharding_utils import DtensorShardOperation"
    )
    assert "transformers.distributed.sharding_utils" in modules_loaded_by(code)


def test_functions_are_marked_for_the_compiler_when_they_are_called() -> None:
    code = (
        "import torch\nfrom vllm.utils.lazy_modules import without_compiler\n"
        "real = torch.compiler.disable\n"
        "with without_compiler():\n"
        "    @torch.compiler.disable\n    def once(x: int) -> int: return x + 1\n"
        "    @torch.compiler.disable(recursive=False)\n    def twice(x: int) -> int: return x + 2\n"
        "assert torch.compiler.disable is real and once.__name__ == 'once'\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert (once(1), twice(1), once(2)) == (2, 3, 3)\n"
    )
    assert "torch._dynamo" in modules_loaded_by(code)


def test_a_class_that_is_imported_later_is_one_where_it_has_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "later_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "classes.py").write_text("class One:\n    number = 1\n")
    (package / "others.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with imported_later("later_package"):
        from later_package.classes import One
        from later_package.others import double

    assert not {"later_package.classes", "later_package.others"} & set(sys.modules)
    assert double(3) == 6 and "later_package.classes" not in sys.modules

    class Two(One):
        pass

    found = sys.modules["later_package.classes"].One
    assert Two.__mro__[1] is found and isinstance(Two(), One) and One.number == One().number == 1
    assert One | None == None | One == found | None
    with imported_later("later_package"):
        from later_package import classes
    assert classes.One is found


@pytest.mark.parametrize("command", ["extract", "serve", "models", "bench", "hidden-states"])
def test_help_loads_no_torch(command: str) -> None:
    """The flags are read from the fields of the configs, whose modules load nothing heavy."""
    code = (
        "import contextlib\nfrom vllm.entrypoints.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main([{command!r}, '--help'])"
    )
    modules = set(modules_loaded_by(code))
    assert "vllm.entrypoints.cli" in modules
    assert not {"torch", "transformers", "numpy", "jinja2", "fastapi"} & modules


def test_options_are_checked_without_torch_until_a_model_is_there() -> None:
    modules = modules_loaded_by("from vllm.config import ModelConfig, VllmConfig")
    assert "vllm.config.model" in modules and "torch" not in modules
