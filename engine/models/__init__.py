"""The models that the engine can run."""
