"""What the notebooks measure: inputs, baselines, peers, sweeps."""
