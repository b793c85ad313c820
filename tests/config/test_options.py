"""An option is one field of one config: everything else derives from it."""

from __future__ import annotations

import inspect
from dataclasses import field, fields
from typing import Annotated

import pytest

from vllm import LLM, envs
from vllm.config import CacheConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs, dataclass_with_options_of
from vllm.entrypoints.cli.help import explain
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.checked import at_least, config, from_mapping
from vllm.utils.options import Option, field_docs


@config()
class ShelfConfig(CacheConfig):
    """The pool, with an option more."""

    num_shelves: Annotated[int, at_least(1), Option(short_flag="-ns")] = 3
    """Shelves that blocks lie on."""


@config()
class ShelfVllmConfig(VllmConfig):
    """The configs of an engine with that pool."""

    cache_config: Annotated[ShelfConfig, from_mapping(ShelfConfig)] = field(
        default_factory=ShelfConfig
    )


@dataclass_with_options_of(ShelfVllmConfig)
class ShelfArgs(EngineArgs):
    """Options of such an engine."""


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="test")
    ShelfArgs.add_cli_args(made)
    return made


def test_a_new_field_is_an_attribute_with_its_default() -> None:
    assert ShelfArgs(model="m").num_shelves == 3
    assert ShelfArgs(model="m", num_shelves=5).num_shelves == 5
    assert ShelfArgs.from_kwargs(model="m", num_shelves=5) == ShelfArgs(model="m", num_shelves=5)
    with pytest.raises(ValueError, match=r"'num_shelfs' \(did you mean 'num_shelves'\?\)"):
        ShelfArgs.from_kwargs(model="m", num_shelfs=5)
    assert "num_shelves" not in {f.name for f in fields(EngineArgs)}


def test_a_new_field_is_a_flag_with_help() -> None:
    def parse(*flags: str) -> EngineArgs:
        return ShelfArgs.from_cli_args(parser().parse_args(["--model", "m", *flags]))

    assert parse().num_shelves == 3
    assert parse("--num-shelves", "4").num_shelves == parse("-ns", "4").num_shelves == 4
    assert parse("--num_shelves=2k").num_shelves == 2000
    explained = explain(parser(), "num-shelves")
    assert explained is not None
    assert "ShelfConfig:" in explained and "The pool, with an option more." in explained
    assert "Shelves that blocks lie on. (default: 3)" in explained


def test_a_new_field_reaches_its_config_and_is_checked(llama: str) -> None:
    made = ShelfArgs(model=llama, num_shelves=7, block_size=32).create_engine_config()
    assert isinstance(made, ShelfVllmConfig)
    assert (made.cache_config.num_shelves, made.cache_config.block_size) == (7, 32)
    with pytest.raises(ValueError, match=r"^num_shelves=0 is not valid; use at least 1$"):
        ShelfArgs(model=llama, num_shelves=0).create_engine_config()


def test_what_llm_spells_out_has_the_defaults_of_the_configs() -> None:
    no_default = {"self", "model", "kwargs"}
    parameters = inspect.signature(LLM.__init__).parameters
    spelt_out = parameters.keys() - no_default - {"chat_template", "hf_overrides"}
    defaults = EngineArgs(model="")
    assert spelt_out | {"model", "hf_overrides"} == {one.name for one in EngineArgs.options()}
    for name in spelt_out:
        assert parameters[name].default == getattr(defaults, name), name


@pytest.mark.parametrize("owner", [ServerSettings, ExtractOptions, EngineArgs, ShelfConfig])
def test_every_field_is_explained(owner: type) -> None:
    names = {f.name for f in fields(owner)}
    explained = set(field_docs(owner))
    if owner is EngineArgs:
        explained |= {option.name for option in EngineArgs.options() if option.help}
    assert names <= explained


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("VLLM_CPU_THREADS", "99999", "use at most 4,096"),
        ("OMP_NUM_THREADS", "99999,2", "use at most 4,096"),
        ("VLLM_DP_RANK", "-1", "use a whole number of at least 0"),
        ("VLLM_DP_SIZE", "0", "use a whole number of at least 1"),
    ],
)
def test_environment_variables_that_cannot_be(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}': {expected}"):
        getattr(envs, name)
