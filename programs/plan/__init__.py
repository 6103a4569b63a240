"""What a program runs: settings, axes, sweeps and comparisons."""
