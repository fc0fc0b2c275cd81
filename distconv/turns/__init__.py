"""Computes the parts of a partition one after another on one device, exactly, for samples that are too large at once.

Every part is a rank in a thread of its own. One thread at a time computes, the one that has the baton, until it needs
results of other parts. Parameters are shared; the caller passes and gets plain, whole tensors. `turning` decides which
models run so, `call` computes one, `pager` keeps it within a limit of memory, and `following` predicts that memory.
"""
