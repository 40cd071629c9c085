"""`make test-gpu`: attention checked on a card, then the card and a model of 7B's shape measured (docs/gpu.md)."""
