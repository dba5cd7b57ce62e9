"""The life of a run's processes: joining, stop signals, the lock of a workdir, the watchdog."""
