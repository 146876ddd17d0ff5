"""Benchmarks beside the peers: `python -m subtensors.bench`."""
