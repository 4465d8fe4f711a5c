"""Validation: records that are not trained on, evaluated by the same loss, and the weights that did best on them."""
