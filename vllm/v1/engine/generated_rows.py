"""Rows of prompt and output: those to compute, and the sample that is made of them.

Positions count over prompt and output together, so most choices are final only when the output
has ended. Until then every row is kept that the choice may name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.positions import parse_positions, resolve_positions
from vllm.hidden_states.sample import HiddenStatesError, HiddenStatesSample
from vllm.v1.engine import GenerationSpec
from vllm.v1.rows.fields.logprobs import OF_NEXT_TOKEN

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


@dataclass(frozen=True)
class RowsOfText:
    """The rows that the caller gets of a text which is not finished."""

    positions: object
    """In any form that ``extract()`` takes."""
    prompt_mask: torch.Tensor | None
    """bool [prompt tokens]; None: none was given."""
    pooling: Pooling

    def to_compute(self, num_prompt_tokens: int, max_tokens: int) -> tuple[list[int] | None, int]:
        """Return ``positions`` and ``output_every`` of a spec with every row that may be chosen.

        ValueError: the choice is wrong, or names a token that cannot be.
        """
        positions, mask = self.positions, self.prompt_mask
        if isinstance(positions, str):
            selection = parse_positions(positions)
            if selection.kind == "all" and self.pooling != "last":
                return None, 0
            if selection.kind == "every":
                return selection.select(num_prompt_tokens).tolist(), selection.every
            if selection.kind == "mask" and mask is not None:
                return mask.nonzero().flatten().tolist(), 1
            return [], 1
        most_tokens = num_prompt_tokens + max_tokens
        whose = "prompt and output have at most"
        named = resolve_positions(positions, most_tokens, whose=whose) or []
        if isinstance(positions, slice):
            return None, 0
        # Those that are counted from the end move with it.
        of_longer = resolve_positions(positions, most_tokens + 1) or []
        pairs = zip(named, of_longer, strict=True)
        from_end = max((most_tokens - one for one, other in pairs if one != other), default=0)
        if not from_end:
            return sorted(set(named)), 0
        first = max(0, num_prompt_tokens + 1 - from_end)
        in_prompt = {*range(first, num_prompt_tokens), *(p for p in named if p < num_prompt_tokens)}
        return sorted(in_prompt), 1

    def chosen(self, num_prompt_tokens: int, mask: torch.Tensor) -> list[int] | None:
        """Return positions in the finished text, whose mask has a value for each of its tokens."""
        chosen = resolve_positions(self.positions, len(mask), mask, num_prompt_tokens)
        if self.pooling != "last":
            return chosen
        return [len(mask) - 1] if chosen is None else chosen[-1:]

    def make_sample(
        self,
        index: int,
        request_id: str,
        prompt_token_ids: list[int],
        spec: GenerationSpec,
        completion: CompletionOutput,
    ) -> HiddenStatesSample:
        """Make the sample of a text that has ended. HiddenStatesError: a row of it is missing."""
        num_prompt, extracted = len(prompt_token_ids), completion.extracted
        token_ids = [*prompt_token_ids, *completion.token_ids]
        num_rows = spec.rank(len(token_ids))
        if extracted is None or len(extracted) < num_rows:
            message = f"{num_rows} rows of hidden states were wanted, and not all were computed"
            raise HiddenStatesError(index, Failure(FailureKind.STEP_FAILED, message))
        extracted = extracted.part(slice(num_rows))  # a stop string may be followed by more tokens
        positions = torch.tensor([spec.position_at(rank) for rank in range(num_rows)]).long()
        mask = torch.ones(len(token_ids), dtype=torch.bool)
        mask[:num_prompt] = False if self.prompt_mask is None else self.prompt_mask
        for name in OF_NEXT_TOKEN & extracted.tensors.keys():
            extracted.tensors[name][positions == len(token_ids) - 1] = math.nan
        sample = HiddenStatesSample(
            index=index,
            request_id=request_id,
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=positions,
            tensors=extracted.tensors,
            layer_ids=spec.layer_ids,
            constants=extracted.constants,
            num_generated_tokens=len(completion.token_ids),
            output=dataclasses.replace(completion, extracted=None),
        )
        if self.pooling == "none":
            sample = sample.with_tensors(loss_mask=mask[positions])
        chosen = self.chosen(num_prompt, mask)
        if chosen is None:
            return sample
        return sample.take_rows(torch.searchsorted(positions, torch.tensor(chosen).long()))
