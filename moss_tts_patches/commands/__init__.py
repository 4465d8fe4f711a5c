"""Commands of ``moss-lowmem``; nothing heavy is imported until one of them runs."""
