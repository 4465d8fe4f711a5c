"""What surrounds the loss in a run: accelerate, checkpointing, parked weights, the report."""
