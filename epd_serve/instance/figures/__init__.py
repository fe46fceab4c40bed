"""An instance's figures: metrics, rates, reports of load, parity of features."""
