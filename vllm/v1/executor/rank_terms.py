"""Comparison of the processes of an engine: their options, and what they are about to compute."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm import envs
from vllm.config.identity import value_identity
from vllm.ops.sources import kernels_of
from vllm.steering import steering_digest
from vllm.utils.options import options_of
from vllm.utils.text import brief
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


def terms_of(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the versions and everything that values and sizes depend on, by name."""
    parallel = vllm_config.parallel_config
    sizes = (
        "tensor_parallel_size",
        "prefill_context_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "data_parallel_rank",
        "nnodes",
    )
    terms = {
        "vllm": __version__,
        "torch": torch.__version__,
        **value_identity(vllm_config, kernels_of(vllm_config.device_config.device_type)),
        **{name: getattr(parallel, name) for name in sizes},
        "VLLM_PP_LAYER_PARTITION": envs.VLLM_PP_LAYER_PARTITION,
    }
    return {name: str(value) for name, value in terms.items()}


def options_of_engine(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the options on which plans depend, by name."""
    found = {}
    for part in (
        vllm_config.cache_config,
        vllm_config.scheduler_config,
        vllm_config.parallel_config,
    ):
        for option in options_of(type(part)):
            found[option.name] = str(getattr(part, option.field.name))
    return found


def differences(terms: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    """Say how some processes' terms differ from those of the first; "": they do not."""
    found = []
    for name in dict.fromkeys(key for one in terms for key in one):
        for other, who in zip(terms[1:], names[1:], strict=True):
            values = [one.get(name, "not there") for one in (terms[0], other)]
            if values[0] != values[1]:
                found.append(
                    f"{name} is {brief(values[0])} in {names[0]}, {brief(values[1])} in {who}"
                )
                break
    return "; ".join(found)


def plan_of(scheduled: SchedulerOutput) -> tuple[Any, ...]:
    """Return what a step does, in a form whose repr is the same in all processes."""
    cached = scheduled.scheduled_cached_reqs
    return (
        [_new_request(one) for one in scheduled.scheduled_new_reqs],
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
        scheduled.num_scheduled_tokens,
        sorted(scheduled.finished_req_ids),
        scheduled.block_copies,
        scheduled.num_layers_to_run,
    )


def _new_request(new: NewRequestData) -> tuple[Any, ...]:
    params = new.sampling_params
    named = [
        (name, getattr(params, name))
        for name in params.__struct_fields__
        if not name.startswith("_") and name not in ("extra_args", "steering")
    ]
    specs = params.steering_specs
    return (
        new.req_id,
        new.prompt_token_ids,
        new.block_ids,
        new.num_computed_tokens,
        new.extraction,
        hashlib.sha256(new.prompt_embeds or b"").hexdigest(),
        steering_digest(specs) if specs else "",
        named,
    )
