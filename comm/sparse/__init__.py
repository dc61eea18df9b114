"""Sparse gradients: rows and their indices, sent over dedicated streams.

Every algorithm returns exactly the rows that some rank has, because lazily updating optimizers (SparseAdam, Adagrad)
also update a row whose gradient is zero. A dense sum does not show which rows were present. So each row that is sent
dense has one more element, which is 1 on ranks that have the row. The row is present if the sum of these elements
is not 0. Rows are added in rank order, so that results are bitwise equal on all ranks.
"""
