"""Bytes in the units that cards, RAM and disks are sold in, and what a matrix product is counted in."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
TFLOP = 10**12
