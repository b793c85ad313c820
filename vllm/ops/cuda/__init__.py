"""Overrides for NVIDIA GPUs: Triton where it pays, torch and cuBLAS elsewhere.

Nothing here waits for the device. The bits of a row do not depend on the batch, except that

* cuBLAS chooses the algorithm of products by the number of rows;
* recurrent layers give the same bits only for cuts at multiples of 64 tokens
  (``triton_recurrent``).
"""

# Each module registers its overrides.
from vllm.ops.cuda import (  # noqa: F401
    linear,
    triton_attention,
    triton_channel_delta_rule,
    triton_elementwise,
    triton_experts,
    triton_linear_recurrence,
    triton_mlstm,
    triton_recurrent,
    triton_recurrent_conv,
    triton_rotary,
    triton_selective_scan,
    triton_state_space,
    triton_wkv,
)
