"""The tie between an LM head and the embeddings, through loading and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.layers.weight import weight_of
from vllm.model_executor.layers.weight_share import Stored
from vllm.model_executor.utils import ElsewhereParameter

logger = init_logger(__name__)


class HasHead(Protocol):
    """A model with a head; ``model.embed_tokens`` are its embeddings."""

    lm_head: ParallelLMHead
    model: Any


class HeadTie:
    """The tie between the LM head and the embeddings of one model.

    A checkpoint whose config ties them may contain a head too. If its values differ from the
    embeddings, the two are untied, whatever the config says, as in transformers. If a later update
    brings embeddings and no head, they are the head again, as the config says.
    """

    def __init__(self, model: HasHead, is_tied: bool) -> None:
        self._model = model
        self.is_tied = is_tied
        self._may_tie_again = False  # whether an update untied the head
        self._head_came = False  # whether the update that goes on has a head
        if is_tied:
            self.tie()

    def tie(self) -> None:
        """Let the head be the embeddings."""
        self._model.lm_head.tie_weights(self._model.model.embed_tokens)

    def begin_update(self) -> None:
        """Note that new weights come, in one or several calls of :meth:`follow`."""
        self._head_came = False

    def follow(self, heads: Sequence[Stored], tables: Sequence[Stored], loaded: set[str]) -> bool:
        """Untie or tie the head after weights came; return whether it has its values.

        heads: the tensors of a tied head that the checkpoint contains; tables: those of the
        embeddings, while the head is tied; loaded: names of what was loaded.

        Raises:
            ValueError: the head differs, and both were rounded as one table.
        """
        self._head_came |= bool(heads) or "lm_head.weight" in loaded
        for head in heads:
            self._untie(head, tables)
        return bool(heads) or self._tie_again(loaded)

    def _untie(self, head: Stored, tables: Sequence[Stored]) -> None:
        lm_head = self._model.lm_head
        table = lm_head.weight
        if isinstance(table, ElsewhereParameter) or head.device.type == "meta":
            return
        if weight_of(table).is_rehearsing:  # the embeddings to compare with are the old ones
            lm_head.weight_loader(table, head)
            is_rounded = weight_of(table).quantise is not None
            if is_rounded and not self._equals(head, tables):
                raise ValueError(
                    "weight 'lm_head.weight' differs from the embeddings, and head_quantization "
                    "rounded both as one table; make a new engine for a head of its own"
                )
            return
        if not lm_head.untie(head):
            return
        self._may_tie_again = weight_of(lm_head.weight).is_finished
        logger.warning(
            "config.json has tie_word_embeddings=true, but the checkpoint has a head with other "
            "values than its embeddings: the two are not tied"
        )
        self.is_tied = False

    def _equals(self, head: Stored, tables: Sequence[Stored]) -> bool:
        """Return whether a head has the values of the embeddings that came with it, or else of
        those in memory."""
        if not tables:
            return self._model.lm_head.holds(head)
        given = (head, tables[0])
        floats = [one for one in given if isinstance(one, torch.Tensor)]
        return len(floats) == 2 and torch.equal(floats[0], floats[1].to(floats[0]))

    def _tie_again(self, loaded: set[str]) -> bool:
        comes_alone = "model.embed_tokens.weight" in loaded and not self._head_came
        if not (self._may_tie_again and comes_alone):
            return False
        if not weight_of(self._model.lm_head.weight).is_rehearsing:
            self.tie()
            self.is_tied, self._may_tie_again = True, False
        return True
