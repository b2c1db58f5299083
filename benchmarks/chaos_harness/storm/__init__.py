"""Real worker and enqueuer processes, a primary and its synchronous standby, real faults."""
