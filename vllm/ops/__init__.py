"""The operations that models and the extraction path need beyond torch's own.

``vllm.ops.operation`` says what an operation is. One module a family declares them; the C++ of
``csrc/cpu`` and the functions of ``vllm.ops.cuda`` do them better where they can.
"""

import vllm.ops.sources  # noqa: F401  where implementations are found
