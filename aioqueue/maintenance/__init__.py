"""The duties that no job depends on one process for: tick, promote, rescue, sweep. One shared loop, no leader (service.py)."""
