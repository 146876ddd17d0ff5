"""What `python -m subtensors` runs."""
