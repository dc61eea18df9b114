"""Sums of sparse gradients over ranks. A sparse gradient is a set of rows and their indices.

Every algorithm returns exactly the rows that some rank has, because optimizers that update only the present rows
(SparseAdam, Adagrad) also update a present row whose gradient is zero. An all-reduce of dense rows does not show which
rows were present. So each dense row that is sent has one more element, which is 1 on ranks that have the row. The row
is present if the sum of these elements is not 0. Rows are added in rank order, so that results are bitwise equal on all
ranks.
"""
