"""Real prefill and decode passes: what a cache holds, what a machine does, beside what `kvctl.size` predicts."""
