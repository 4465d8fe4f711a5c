"""What has to be known before a training starts: which Python, which family, which engine, is the machine sound.

Nothing here imports torch at the top: the launcher asks these questions before the user has waited for anything.
"""
