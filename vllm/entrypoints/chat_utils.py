"""The place where vLLM has :mod:`vllm.transformers_utils.chat_template`."""

from vllm.transformers_utils.chat_template import *  # noqa: F403
