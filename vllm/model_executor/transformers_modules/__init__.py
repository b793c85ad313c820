"""transformers' own modules on our pool: any causal model that has no class of ours.

    choice        our class, or transformers' module
    loading       its weights, by transformers' own loading
    boundaries    its decoder layers: rows are captured between them, none runs above the deepest
    survey        what a pass over a few tokens shows: which attention is asked for, with which mask
    packed        all requests of a step as one sequence, attention through our layers
    one_by_one    one request after another, what transformers caches kept in the pool
    row_by_row    functions of torch whose bits depend on the batch, replaced
    parts         linear layers and experts, replaced by ours
    self_check    the result against plain transformers, when the model is loaded
    model         the model class that the engine sees

Nothing here knows a family. What cannot be served right is refused when the engine starts.
"""
