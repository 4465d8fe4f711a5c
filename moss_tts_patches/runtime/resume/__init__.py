"""Resume points of a training: written at optimizer steps, found again, and reached through upstream's own loop."""
