"""Computes the parts of a partition one after another on one device, exactly, for samples that are too large at once.

Every part is a rank in a thread of its own. A baton goes round: the thread that has it computes until it needs what
other parts have not made yet. Parameters are shared; the caller gives and gets plain, whole tensors.
"""
