"""The chunked loss: backbone hidden states in, loss and complete gradients out, nothing kept in between.

``problem`` says what is computed, ``cross_entropy`` and ``rows`` are pure functions of tensors, ``engine`` and
``schedules`` decide in which order. Nothing here knows a model family, the environment or upstream.
"""
