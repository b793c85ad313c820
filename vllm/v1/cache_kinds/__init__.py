"""What layers keep in the KV pool: one module a kind, which answers for all of it.

A kind is a spec class (``base.KVCacheSpec``): how its state lies in a block, the views of a layer,
the manager of its block tables, the metadata that its kernels read. Planner, scheduler and runner
ask the spec, never what class it is of, so that one more kind is one more module.
"""
