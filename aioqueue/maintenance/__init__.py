"""The duties that no job depends on one process for: tick, promote, rescue. One shared loop, no leader (service.py)."""
