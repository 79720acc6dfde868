"""The Hadamard rotation of a cache in NumPy, by its definition."""

from __future__ import annotations

import functools

import numpy as np


def rotate(x):
    """`x` times the block-diagonal orthonormal Hadamard matrix, over the last dimension; its own inverse."""
    return x @ _matrix(x.shape[-1])


@functools.cache
def _matrix(dim):
    """Blocks of the largest power of two that divides `dim`; within one, entry (i, j) has the sign of (-1) ** popcount(i & j)."""
    size = dim & -dim
    matrix = np.zeros((dim, dim))
    for i in range(dim):
        for j in range(dim):
            if i // size == j // size:
                matrix[i, j] = (-1) ** (i % size & j % size).bit_count() / np.sqrt(size)
    return matrix
