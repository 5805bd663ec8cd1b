"""The protocol checker, the timeline and the counters: observers of the virtual device."""
