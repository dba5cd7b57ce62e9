"""The life of a run's processes: heartbeats, leases, the watchdog, preemption."""
