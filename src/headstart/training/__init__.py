"""Train a multi-token-prediction head for a model, on text that the model generates."""
