"""Training files: found, read and checked record by record before anything is trained on them.

What differs by family comes in as one :class:`.rules.RecordRules`; nothing here knows a family's name.
"""
