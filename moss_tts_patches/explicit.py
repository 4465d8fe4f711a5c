"""Activation by import, for an sft.py that was patched to ask for it (see ``patches/``).

It does what the start-up hook does, and nothing unless ``MOSS_LOWMEM`` asks for it; both together are one activation.
"""

import argparse

from .bootstrap import on_argparse_import

on_argparse_import(argparse)
