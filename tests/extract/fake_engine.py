"""An engine that computes nothing: rows are a function of token, position and layer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.positions import parse_positions
from vllm.hidden_states.sample import ExtractRequest, FailedSample, HiddenStatesSample
from vllm.v1.rows.fields.fp8 import quantize_rows
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES

FAILING_TOKEN = 299
"""A prompt with it fails."""
DEADLY_TOKEN = 298
"""An engine that meets it dies, the first time."""
MARKER = "FAKE_ENGINE_MARKER"
"""Environment variable: the file that says that an engine has died."""
WINDOW = 5


def fake_rows(token_ids: list[int], layers: Iterable[int | str], hidden_size: int) -> torch.Tensor:
    """float32 [tokens, layers, hidden]"""
    tokens = torch.tensor(token_ids, dtype=torch.float32)[:, None, None]
    places = torch.arange(len(token_ids), dtype=torch.float32)[:, None, None]
    layer_ids = torch.tensor([float(99 if one == "norm" else one) for one in layers])[None, :, None]
    columns = torch.arange(hidden_size, dtype=torch.float32)
    return torch.sin(tokens * 0.37 + places * 0.11 + layer_ids * 1.3 + columns) + 0.01 * tokens


class FakeEngine:
    """The part of an LLM that ``vllm extract`` uses."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.most_ahead = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def extract(
        self,
        prompts: Iterable[ExtractRequest],
        layers: tuple[int, ...],
        positions: str,
        dtype: str,
        *,
        ordered: bool,
        on_error: str,
        pooling: str = "none",
    ) -> Iterator[Any]:
        assert ordered
        assert on_error == "yield"
        waiting: list[ExtractRequest] = []
        index = 0
        self.pooling = pooling
        for request in prompts:
            waiting.append(request)
            if len(waiting) == WINDOW:
                yield self._result(index, waiting.pop(0), layers, positions, dtype)
                index += 1
        for request in waiting:
            yield self._result(index, request, layers, positions, dtype)
            index += 1

    def _result(
        self,
        index: int,
        request: ExtractRequest,
        layers: tuple[int, ...],
        positions: str,
        dtype: str,
    ) -> Any:
        token_ids: list[int] = request.prompt["prompt_token_ids"]  # type: ignore[index,typeddict-item,call-overload]
        if FAILING_TOKEN in token_ids:
            failure = Failure(FailureKind.STEP_FAILED, "it was told to")
            return FailedSample(index, str(index), failure)
        if DEADLY_TOKEN in token_ids:
            die_once()
        mask: Any = request.mask
        chosen = parse_positions(positions).select(len(token_ids), mask)
        rows = fake_rows(token_ids, layers, self.hidden_size)[chosen]
        scales = None
        if self.pooling != "none":
            rows = rows.mean(0, keepdim=True) if self.pooling == "mean" else rows[-1:]
            chosen = chosen[-1:]
        if dtype == "fp8":
            rows, scales = quantize_rows(rows)
        rows = rows.to(STORAGE_DTYPES[dtype])
        tensors = {"hidden_states": rows} | ({} if scales is None else {"scales": scales})
        if mask is not None and self.pooling == "none":
            tensors["loss_mask"] = mask[chosen]
        return HiddenStatesSample(
            index, str(index), torch.tensor(token_ids), chosen, tensors, layers
        )


def die_once() -> None:
    marker = Path(os.environ[MARKER])
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def load_fake(engine_args: EngineArgs) -> FakeEngine:
    config = json.loads((Path(engine_args.model) / "config.json").read_text())
    return FakeEngine(config["hidden_size"])
