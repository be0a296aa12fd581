"""Fast paths per device, each beside the stock-op function that is its oracle."""
