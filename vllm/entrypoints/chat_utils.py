"""vLLM's module name for :mod:`vllm.transformers_utils.chat_template`."""

from vllm.transformers_utils.chat_template import *  # noqa: F403
