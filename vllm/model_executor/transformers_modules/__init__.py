"""transformers' own modules on our pool: any causal model that has no class of ours.

    choice        our class, or transformers' module: what it makes of a config
    loading       its weights, by transformers' own loading
    boundaries    its decoder layers: rows are captured between them, none runs above the deepest;
                  encoders of something else than text: dropped
    survey        what a pass over a few tokens shows: which attention is asked for, with which
                  mask; what modules keep in themselves, which is refused
    sequences     a way to run the requests of a step
    packed        all requests of a step as one sequence, attention through our layers
    one_by_one    one request after another, what transformers caches kept in the pool
    cached        what transformers caches of a layer, as layers of ours
    positions     rope scalings that follow the length of the sequence, request by request
    row_by_row    functions of torch whose bits depend on the batch, replaced
    parts         linear layers, replaced by ours; experts: those of mixtures
    mlps          what lies between products, by the shared operations where they give the same
    rotations     of queries and keys, likewise
    model         the model class that the engine sees

The result is held against plain transformers when the model is loaded (vllm.v1.worker.self_check).

Nothing here knows a family. What cannot be served right is refused when the engine starts.
"""
