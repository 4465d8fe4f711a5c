"""Train MOSS-TTS with its official scripts in a fraction of the memory.

Importing this package does nothing: ``moss_tts_patches.bootstrap`` is the start-up hook, and
``MOSS_LOWMEM=1`` switches it on.
"""

__version__ = "0.1.0"
