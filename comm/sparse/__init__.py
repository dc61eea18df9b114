"""How sparse gradients travel: rows and their numbers, over streams of their own.

Every way gives exactly the rows that some rank has, as optimizers that update lazily (SparseAdam, Adagrad) update a row
of zeros, too, and a sum that has travelled dense does not say which rows were there. So rows that travel dense take one
element more each, a 1 from every rank that has the row: the sum is not zero exactly where some rank has it. Parts are
added in the order of the ranks, so that all get the same bits.
"""
