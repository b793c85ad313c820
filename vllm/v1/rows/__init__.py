"""Rows of captured hidden states, from the residual stream to their destination.

    capture (RowCapture)      the stream at a boundary -> a row cache: the pool, or staging
    leave (send_rows)         row cache -> host: copied, checked, cast
    destination               the caller's tensors, a file, what a connector makes of it

All rows take this path; they differ only in their origin and their destination.
"""
