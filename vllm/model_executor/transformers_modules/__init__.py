"""transformers' own modules on our pool: any causal model that has no class of ours.

    choice        chooses our class or transformers' module for a config
    loading       loads weights by transformers' own loading
    boundaries    finds the decoder layers: rows are captured between them, and none runs above the
                  deepest; drops encoders of other things than text
    survey        runs a pass over a few tokens to find which attention is asked for, with which
                  mask, and whether modules keep state, which is refused
    sequences     the interface of ways to run the requests of a step
    one_sequence  runs all requests of a step as one sequence, with attention through our layers
    one_by_one    runs one request after another, and keeps what transformers caches in the pool
    without_cache runs one request after another, each from its first token
    cached        keeps what transformers caches of a layer, as layers of ours
    positions     follows the length of each sequence in rope scalings that depend on it
    row_by_row    replaces functions of torch whose bits depend on the batch
    parts         replaces linear layers and norms by ours
    experts       replaces experts of mixtures
    mlps          replaces what lies between products by shared operations that give the same
    rotations     replaces rotations of queries and keys, likewise
    model         the model class that the engine sees

A model over several processes needs more:

    stages        runs some of the layers, as a pipeline stage
    cuts          cuts layers over tensor-parallel ranks, by the plan that transformers has
    references    keeps what plain transformers computed before the model was cut
    made_up       gives values to weights that only have a shape

When a model is loaded, the result is compared with plain transformers (vllm.v1.worker.self_check).

Nothing here knows a family. Modules that cannot be served right are refused at the start.
"""
