"""The kinds of content that layers keep in the KV pool, one module per kind.

A kind is a spec class (``base.KVCacheSpec``). It defines the layout in a block, the views of a
layer, the manager of its block tables and the metadata that its kernels read. Planner, scheduler
and runner ask the spec and never test its class, so that one more kind is one more module.
"""
