"""Regions: ops on chunked values, recorded, and run chunk by chunk when a value is asked for."""
