"""Endpoints that replace the weights of a server that runs.

vLLM's: /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update
TRL's up to 1.10: /init_communicator/, /update_named_param/, ... /close_communicator/

Both kinds receive tensors in a group of processes (``--weight-transfer-config``). In vLLM's group
the trainer is rank 0, and a call lasts until its tensors were received. In TRL's the trainer is
the last rank, and sends a tensor after the call that announces it has ended. Without a group,
``/update_weights`` reads a folder of the server's machine (``--weight-folders``).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field

from vllm.distributed.weight_transfer import PACKED_BYTES, Announced, GroupPlace
from vllm.entrypoints.openai.address_fields import IN_ADDRESS
from vllm.entrypoints.openai.errors import bad_form, bad_request
from vllm.entrypoints.openai.protocol import Body
from vllm.entrypoints.openai.state import ServerState, State

vllm_router = APIRouter(include_in_schema=False)
trl_router = APIRouter(include_in_schema=False)

Port = Annotated[int, Field(ge=1, le=65535)]
Rank = Annotated[int, Field(ge=0, le=4096)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Shape = Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=8)]


class InitCommunicatorRequest(Body):
    """Body of TRL's /init_communicator/."""

    host: str
    """Address at which the server listens for the trainer."""
    port: Port
    world_size: int
    client_device_uuid: str = ""


class ParameterForm(Body):
    """Body of TRL's /update_named_param/: a tensor that the trainer will send."""

    name: Name
    dtype: str
    """Such as torch.bfloat16."""
    shape: Shape


class ParameterForms(Body):
    """Body of /batch_update_named_params/: they come one after another, and then a barrier."""

    params: Annotated[list[ParameterForm], Field(min_length=1, max_length=100_000)]


class InitInfo(Body):
    """The group, in the body of /init_weight_transfer_engine."""

    master_address: str
    """Address at which the trainer, which is rank 0, listens."""
    master_port: Port
    rank_offset: Rank = 1
    """The rank of this server's worker."""
    world_size: Rank
    packed: bool = False
    """The default of /update_weights."""


class InitRequest(Body):
    """Body of /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(Body):
    """The weights, in the body of /update_weights: a folder, or tensors that the trainer sends."""

    path: str | None = None
    names: list[Name] = Field(default_factory=list)
    dtype_names: list[str] = Field(default_factory=list)
    shapes: list[Shape] = Field(default_factory=list)
    packed: bool | None = None
    """The tensors come in buffers of bytes, each of more than packed_buffer_size_bytes."""
    packed_buffer_size_bytes: Annotated[int, Field(ge=1)] = PACKED_BYTES


class UpdateRequest(Body):
    """Body of /update_weights."""

    update_info: UpdateInfo


# ---- TRL's, up to 1.10


@trl_router.post("/init_communicator/")
async def init_communicator(
    state: State, body: Annotated[InitCommunicatorRequest, Depends(InitCommunicatorRequest.read)]
) -> dict[str, str]:
    """Wait for a trainer at an address, after this call."""
    if body.world_size != 2:
        raise bad_request(f"world_size={body.world_size}: use 2, for one trainer and one worker")
    await state.weights.transfers.join(GroupPlace(body.host, body.port, 0, 2))
    return {"message": "Request received, initializing communicator"}


@trl_router.post("/update_named_param/")
async def update_named_param(
    state: State, body: Annotated[ParameterForm, Depends(ParameterForm.read)]
) -> dict[str, str]:
    """Receive a tensor after this call."""
    await _announce(state, [body])
    return {"message": "Request received, updating named parameter"}


@trl_router.post("/batch_update_named_params/")
async def batch_update_named_params(
    state: State, body: Annotated[ParameterForms, Depends(ParameterForms.read)]
) -> dict[str, str]:
    """Receive tensors after this call."""
    await _announce(state, body.params)
    return {"message": f"Request received, updating {len(body.params)} parameters"}


async def _announce(state: ServerState, forms: list[ParameterForm]) -> None:
    tensors = [(form.name, form.dtype, form.shape) for form in forms]
    await state.weights.transfers.announce(Announced(tensors, src=1, has_barrier=True))


@trl_router.post("/close_communicator/", dependencies=IN_ADDRESS)
async def close_communicator(state: State) -> dict[str, str]:
    """Leave the group of the trainer, and end its update."""
    await state.weights.leave()
    return {"message": "Request received, closing communicator"}


# ---- vLLM's


@vllm_router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(
    state: State, body: Annotated[InitRequest, Depends(InitRequest.read)]
) -> dict[str, str]:
    """Join the group of a trainer."""
    info, transfers = body.init_info, state.weights.transfers
    if not 1 <= info.rank_offset < info.world_size:
        raise bad_request(
            f"init_info.rank_offset={info.rank_offset}: has to be in [1, world_size), and "
            f"world_size is {info.world_size}"
        )
    place = (info.master_address, info.master_port, info.rank_offset, info.world_size)
    await transfers.join(GroupPlace(*place))
    await transfers.wait_for_group()
    state.weights.is_packed = info.packed
    return {"message": "Weight transfer initialized"}


@vllm_router.post("/start_weight_update", dependencies=IN_ADDRESS)
async def start_weight_update(state: State) -> dict[str, str]:
    """Complete requests under way, and let no new ones begin."""
    await state.weights.transfers.start()
    return {"message": "Weight update started"}


@vllm_router.post("/update_weights")
async def update_weights(
    state: State, body: Annotated[UpdateRequest, Depends(UpdateRequest.read)]
) -> dict[str, str]:
    """Replace weights by those in a folder, or by tensors that the trainer sends."""
    info = body.update_info
    if info.path is not None:
        await state.weights.load_folder(info.path)
        return {"message": "Weights updated"}
    if not info.names or not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise bad_form(
            ("body.update_info", "names, dtype_names and shapes need the same number of entries")
        )
    is_packed = state.weights.is_packed if info.packed is None else info.packed
    tensors = list(zip(info.names, info.dtype_names, info.shapes, strict=True))
    buffer_bytes = info.packed_buffer_size_bytes if is_packed else 0
    await state.weights.transfers.receive(Announced(tensors, src=0, packed_bytes=buffer_bytes))
    return {"message": "Weights updated"}


@vllm_router.post("/finish_weight_update", dependencies=IN_ADDRESS)
async def finish_weight_update(state: State) -> dict[str, str]:
    """Forget all prefixes, and let requests begin."""
    await state.weights.transfers.finish()
    return {"message": "Weight update finished"}


@vllm_router.get("/server_info")
async def get_server_info(state: State) -> dict[str, Any]:
    """Return the entries of the configuration that trainers read."""
    config, transfer = state.engine.vllm_config, state.settings.weight_transfer_config
    model = config.model_config
    return {
        "vllm_config": {
            "model_config": {
                "model": model.model,
                "dtype": str(model.dtype),
                "max_model_len": model.max_model_len,
            },
            "parallel_config": {"world_size": config.parallel_config.world_size},
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }
    }
