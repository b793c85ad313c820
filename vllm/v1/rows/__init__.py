"""Rows of captured hidden states, from the residual stream to whoever asked for them.

    capture (RowCapture)      the stream at a boundary -> a row cache: the pool, or staging
    leave (send_rows)         row cache -> host: copied, looked at, cast
    destination               the caller's tensors, a file, what a connector makes of it

One way for all: rows differ in where they come from and in their destination alone.
"""
