"""Runs one request of a step after another, each from its first token; only ids are cached.

This is for modules without a cache, or with one that has no place in the pool. A pass over all
tokens so far is what plain transformers computes, so rows are right whatever the module keeps, as
long as later tokens do not change earlier rows. A prompt costs one pass per chunk, and a generated
token a pass over all tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm.forward_context import RowSink
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    NotServableError,
    failures_refuse,
)
from vllm.model_executor.transformers_modules.cached import CachedRows, Part
from vllm.model_executor.transformers_modules.sequences import EachByItself
from vllm.utils.boundaries import LayerId

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_SURVEY_TOKENS = 300
_EARLIER_TOKENS = 131
_MOST_CHANGE = 1e-3
"""Largest change of a row, as a share of the rms."""
_MOST_CHANGE_16_BIT = 0.25
"""Most change of the median row: roundings may choose other experts for a few rows."""
_ID_DTYPE = torch.float32
"""Dtype of ids in the pool, exact below 2**24; the pool has no wider type."""


class WithoutCache(EachByItself):
    """Runs a transformers decoder over all tokens of a request whenever tokens are added."""

    takes_embeddings = False
    reads_all_tokens = True

    def __init__(
        self, vllm_config: VllmConfig, causal_lm: Any, decoder: Any, boundaries: Boundaries
    ) -> None:
        super().__init__(vllm_config, causal_lm, decoder, boundaries)
        self._options = {"use_cache": False} if "use_cache" in self._arguments else {}
        with torch.inference_mode(), failures_refuse():
            self._check_is_causal(vllm_config.model_config)
        self._token_ids = CachedRows(1, 1, 0, "token_ids", _ID_DTYPE)
        self.layer_names = [self._token_ids.layer_name]

    def _check_is_causal(self, model_config: ModelConfig) -> None:
        """NotServableError: later tokens change rows of earlier tokens."""
        num_tokens = min(_SURVEY_TOKENS, model_config.max_model_len)
        ids = torch.arange(num_tokens, device=self._device) * 31 % model_config.get_vocab_size()
        rows = []
        for count in (num_tokens, max(1, min(_EARLIER_TOKENS, num_tokens // 2))):
            with self._boundaries.watch(None, None):
                output = self._call(ids[:count])
            if len(output[0][0]) != count:
                raise NotServableError(f"it makes {len(output[0][0])} rows of {count} tokens")
            rows.append(output[0][0].float())
        self.output_class = type(output)
        whole, earlier = rows[0][: len(rows[1])], rows[1]
        changes = (whole - earlier).square().mean(-1).sqrt() / whole.square().mean().sqrt()
        is_wide = model_config.dtype is torch.float32
        change = changes.max() if is_wide else changes.median()
        if not change <= (_MOST_CHANGE if is_wide else _MOST_CHANGE_16_BIT):
            raise NotServableError("rows of earlier tokens change with later ones")

    def _all_ids(self, part: Part, new: torch.Tensor) -> torch.Tensor:
        """int64 [tokens so far], with this step's, which are kept."""
        ids = new
        if part.num_computed:
            before = self._token_ids.load(part)[0].flatten().to(new.dtype)
            ids = torch.cat((before, new))
        rows = ids.to(_ID_DTYPE)[None, None, :, None]
        self._token_ids.store(part, rows, rows[..., :0])
        return ids

    def _run_request(
        self,
        part: Part,
        tokens: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        incoming: torch.Tensor | None,
        sink: RowSink,
    ) -> torch.Tensor:
        ids = self._all_ids(part, tokens["input_ids"])
        later = _LaterRows(sink, part.num_computed)
        decode = partial(self._call, ids)
        hidden = self._pass(decode, later, part, range(len(ids)), incoming)
        return hidden if self._hands_on else hidden[part.num_computed :]

    @property
    def _hands_on(self) -> bool:
        """True if the next stage needs the stream of all tokens."""
        return not self._boundaries.stage.is_last

    def _call(self, ids: torch.Tensor) -> Any:
        (decoder,) = self._decoders
        return decoder(input_ids=ids[None], **self._options)


class _LaterRows(RowSink):
    """Passes on the rows from one token on."""

    def __init__(self, sink: RowSink, first: int) -> None:
        self._sink, self._first = sink, first
        self.layer_ids = sink.layer_ids

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        hidden, *rest = values
        self._sink.put(source, index, hidden[self._first :], *rest)
