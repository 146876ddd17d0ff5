"""The programs behind `python -m subtensors`."""
