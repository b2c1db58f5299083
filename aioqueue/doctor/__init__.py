"""The checks of a database: what stands in the way of tenants kept apart, and of a queue that works. See examine.py."""
