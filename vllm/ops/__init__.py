"""The operations that models and the extraction path need beyond torch's own.

``vllm.ops.operation`` explains what an operation is. One module per family declares them; the C++
of ``csrc/cpu`` and the functions of ``vllm.ops.cuda`` override those that they do better.
"""

import vllm.ops.sources  # noqa: F401  where implementations are found
